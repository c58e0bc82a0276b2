-- Owns completion while typing: when the daemon is asked, the ghost text, and accepting it.
local config = require('mlxbc.config')
local connection = require('mlxbc.connection')
local context = require('mlxbc.context')
local notice = require('mlxbc.notice')
local suggestion = require('mlxbc.suggestion')
local uv = vim.uv or vim.loop

local M = {}

local space = vim.api.nvim_create_namespace('mlxbc.completion')
local inline = vim.fn.has('nvim-0.10') == 1
local timer = uv.new_timer()
local group = nil
local pending = false -- a request is being waited out
local now = nil -- the suggestion and where it stands

local function place()
  local cursor = vim.api.nvim_win_get_cursor(0)
  local buffer = vim.api.nvim_get_current_buf()
  return {
    buffer = buffer,
    row = cursor[1] - 1,
    column = cursor[2],
    tick = vim.api.nvim_buf_get_changedtick(buffer),
    line = vim.api.nvim_get_current_line(),
  }
end

local function wipe(buffer)
  if vim.api.nvim_buf_is_valid(buffer) then
    vim.api.nvim_buf_clear_namespace(buffer, space, 0, -1)
  end
end

local function spaces(text)
  return (text:gsub('\t', (' '):rep(vim.bo.tabstop)))
end

local function show()
  local text, at = now.text.rest, now.at
  wipe(at.buffer)
  if not text:find('%S') then
    return
  end
  local lines = vim.split(text, '\n', { plain = true })
  local mark = { virt_text = { { spaces(lines[1]), 'MlxbcGhost' } }, hl_mode = 'combine' }
  if inline then
    mark.virt_text_pos = 'inline'
  else
    -- Older versions can only write over a line: so what stands behind the cursor is written again.
    mark.virt_text_pos = 'overlay'
    mark.virt_text[2] = { spaces(at.line:sub(at.column + 1)), 'Normal' }
  end
  local below = {}
  for index = 2, #lines do
    below[index - 1] = { { spaces(lines[index]), 'MlxbcGhost' } }
  end
  if #below > 0 then
    mark.virt_lines = below
  end
  pcall(vim.api.nvim_buf_set_extmark, at.buffer, space, at.row, at.column, mark)
end

-- Forget the suggestion, and whatever is under way for one.
function M.dismiss()
  timer:stop()
  pending = false
  if now then
    if now.call then
      now.call.cancel()
    end
    wipe(now.at.buffer)
    now = nil
  end
end

local function hear(mine, message)
  if now ~= mine then
    return
  end
  if message.type == 'token' then
    if message.channel == nil then
      mine.text:feed(message.text)
    end
  elseif message.type == 'done' then
    notice.works()
    mine.call = nil
    mine.text:finish(message.reason == 'length' or message.reason == 'deadline', mine.behind)
  elseif message.type == 'error' then
    notice.of(message, mine.asked)
    return M.dismiss()
  else
    return
  end
  show()
end

-- Ask for a suggestion at the cursor now; `asked` says that the user wants it.
function M.ask(asked)
  M.dismiss()
  local at = place()
  local fim, behind = context.around(at.buffer, at.row, at.column)
  local mine = { at = at, text = suggestion.new(), behind = behind, asked = asked }
  now = mine
  mine.call = connection.request(context.request(fim), function(message)
    hear(mine, message)
  end)
end

local function wanted()
  local settings = config.values.completion
  return settings.auto
    and vim.bo.buftype == ''
    and vim.bo.modifiable
    and vim.b.mlxbc ~= false
    and not vim.tbl_contains(settings.exclude, vim.bo.filetype)
    and vim.fn.pumvisible() == 0
    and vim.fn.reg_executing() == ''
end

-- What was typed at the end of `old` to get `new`; nil if something else has happened.
local function typed(old, new)
  if new.buffer ~= old.buffer or new.row ~= old.row or new.column <= old.column then
    return nil
  end
  if
    new.line:sub(1, old.column) ~= old.line:sub(1, old.column)
    or new.line:sub(new.column + 1) ~= old.line:sub(old.column + 1)
  then
    return nil
  end
  return new.line:sub(old.column + 1, new.column)
end

-- The cursor moved, or the text changed: often both are said of one key.
local function update()
  local at = place()
  if now then
    if now.at.tick == at.tick and now.at.buffer == at.buffer then
      if now.at.row ~= at.row or now.at.column ~= at.column then
        M.dismiss()
      end
      return
    end
    local text = typed(now.at, at)
    if text and now.text:type(text) then
      now.at = at
      return show()
    end
  end
  if at.tick == M.last_tick and at.buffer == M.last_buffer then
    return
  end
  M.dismiss()
  M.last_tick, M.last_buffer = at.tick, at.buffer
  if wanted() and notice.may_try() then
    pending = true
    timer:start(config.values.completion.debounce_ms, 0, vim.schedule_wrap(function()
      if pending and vim.api.nvim_get_mode().mode:sub(1, 1) == 'i' then
        M.ask()
      end
    end))
  end
end

function M.visible()
  return now ~= nil and now.text.rest:find('%S') ~= nil
end

-- Insert the suggestion's next 'word' or 'line', or 'all' of it.
function M.accept(part)
  if not M.visible() then
    return
  end
  local at = place()
  local text = now.text:take(part)
  local lines = vim.split(text, '\n', { plain = true })
  vim.api.nvim_buf_set_text(at.buffer, at.row, at.column, at.row, at.column, lines)
  local row = at.row + #lines - 1
  local column = #lines[#lines] + (#lines == 1 and at.column or 0)
  vim.api.nvim_win_set_cursor(0, { row + 1, column })
  if part == 'all' or now.text.rest == '' then
    -- TextChangedI follows, and asks for what comes next.
    M.dismiss()
    return
  end
  now.at = place()
  M.last_tick, M.last_buffer = now.at.tick, now.at.buffer
  show()
end

-- What keys did before they were ours.
M.before = {}

-- Keys that do what `key` did before; Neovim itself maps some.
local function otherwise(key)
  local before = M.before[key]
  if before.callback then
    if before.expr == 1 then
      return before.callback() or ''
    end
    return ("<Cmd>lua require('mlxbc.completion').before[%q].callback()<CR>"):format(key)
  end
  if not before.rhs or before.rhs == '' then
    return key
  end
  local keys = before.expr == 1 and vim.api.nvim_eval(before.rhs) or before.rhs
  if before.noremap == 0 then
    vim.api.nvim_feedkeys(vim.api.nvim_replace_termcodes(keys, true, true, true), 'im', false)
    return ''
  end
  return keys
end

local function map(key, action, always)
  if not key then
    return
  end
  local before = vim.fn.maparg(key, 'i', false, true)
  if before.desc ~= 'mlxbc' then
    M.before[key] = before
  end
  vim.keymap.set('i', key, function()
    return (always or M.visible()) and action or otherwise(key)
  end, { expr = true, desc = 'mlxbc' })
end

function M.enable()
  group = vim.api.nvim_create_augroup('mlxbc.completion', { clear = true })
  local function on(events, action)
    vim.api.nvim_create_autocmd(events, { group = group, callback = action })
  end
  on({ 'TextChangedI', 'CursorMovedI' }, update)
  on({ 'InsertLeave', 'BufLeave', 'CompleteChanged' }, M.dismiss)
  on('InsertEnter', function()
    -- Entering insert mode changes nothing; the first change asks.
    M.last_buffer = vim.api.nvim_get_current_buf()
    M.last_tick = vim.api.nvim_buf_get_changedtick(M.last_buffer)
  end)
  on('VimLeavePre', connection.close)
  vim.api.nvim_set_hl(0, 'MlxbcGhost', { link = 'Comment', default = true })
  local keys = config.values.completion.keys
  -- The undo break lets one `u` take back what was accepted, and not what was typed before.
  map(keys.accept, "<C-g>u<Cmd>lua require('mlxbc.completion').accept('all')<CR>")
  map(keys.accept_line, "<C-g>u<Cmd>lua require('mlxbc.completion').accept('line')<CR>")
  map(keys.accept_word, "<C-g>u<Cmd>lua require('mlxbc.completion').accept('word')<CR>")
  map(keys.dismiss, "<Cmd>lua require('mlxbc.completion').dismiss()<CR>")
  map(keys.ask, "<Cmd>lua require('mlxbc.completion').ask(true)<CR>", true)
end

function M.disable()
  M.dismiss()
  if group then
    vim.api.nvim_del_augroup_by_id(group)
    group = nil
  end
end

return M
