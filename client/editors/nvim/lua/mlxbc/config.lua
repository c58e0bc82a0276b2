-- Owns the settings and their defaults.
local M = {}

M.values = {
  -- The daemon's socket; nil finds the user's own, as `mlxbc` does.
  socket = nil,
  completion = {
    -- Suggest while typing, in every ordinary buffer but those of these file types.
    auto = true,
    exclude = { 'gitcommit', 'help' },
    -- Milliseconds of silence at the keyboard before the daemon is asked.
    debounce_ms = 60,
    -- The daemon stops after this many milliseconds with what it has.
    deadline_ms = 3000,
    max_tokens = 96,
    model = nil,
    -- Lines around the cursor that the model sees, and of each other visible buffer.
    lines_before = 256,
    lines_after = 64,
    lines_elsewhere = 64,
    -- Insert mode. Without a suggestion each key does what it did; false leaves one out.
    keys = {
      accept = '<Tab>',
      accept_line = '<M-l>',
      accept_word = '<M-w>',
      dismiss = '<C-]>',
      ask = '<M-\\>',
    },
  },
  chat = {
    model = nil,
    system = nil,
    open = 'botright vsplit',
    -- Other fields of a `generate` message: temperature, max_tokens, ...
    fields = {},
  },
  rewrite = {
    model = nil,
    fields = {},
  },
}

-- Takes the user's settings; an unknown name is an error, since it would do nothing.
function M.set(given)
  local function merge(base, over, path)
    for name, value in pairs(over) do
      local here = path .. name
      if not M.known[here] then
        error('mlxbc: unknown setting ' .. here, 0)
      end
      if type(value) == 'table' and M.known[here] == 'section' then
        merge(base[name], value, here .. '.')
      else
        base[name] = value
      end
    end
  end
  merge(M.values, given, '')
end

-- Settings without a default are not in the table above: Lua has no place for a nil.
M.known = {
  ['socket'] = 'value',
  ['completion.model'] = 'value',
  ['chat.model'] = 'value',
  ['chat.system'] = 'value',
  ['rewrite.model'] = 'value',
}
local open = { ['completion.exclude'] = true, ['chat.fields'] = true, ['rewrite.fields'] = true }

local function list(section, path)
  for name, value in pairs(section) do
    local here = path .. name
    local nested = type(value) == 'table' and not open[here]
    M.known[here] = nested and 'section' or 'value'
    if nested then
      list(value, here .. '.')
    end
  end
end
list(M.values, '')

return M
