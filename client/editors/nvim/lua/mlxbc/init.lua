-- Owns what users call: setup, and the words of :Mlxbc.
local M = {}

local words = {
  chat = function(command)
    require('mlxbc.chat').open(command.rest)
  end,
  send = function()
    require('mlxbc.chat').send()
  end,
  rewrite = function(command)
    require('mlxbc.rewrite').run(command.line1, command.line2, command.rest)
  end,
  cancel = function()
    require('mlxbc.completion').dismiss()
    require('mlxbc.rewrite').cancel()
    require('mlxbc.chat').cancel()
  end,
  enable = function()
    require('mlxbc.completion').enable()
  end,
  disable = function()
    require('mlxbc.completion').disable()
  end,
  status = function()
    M.status()
  end,
}

-- Takes the settings (see config.lua) and starts to suggest while typing.
function M.setup(settings)
  require('mlxbc.config').set(settings or {})
  require('mlxbc.completion').enable()
end

function M.command(command)
  local word, rest = command.args:match('^(%S+)%s*(.*)$')
  if not words[word] then
    return require('mlxbc.notice').say('unknown word ' .. word .. '; there are ' .. table.concat(M.candidates(''), ', '), vim.log.levels.ERROR)
  end
  words[word]({ rest = rest, line1 = command.line1, line2 = command.line2 })
end

function M.candidates(lead, line)
  if line and line:find('Mlxbc!?%s+%S+%s') then
    return {}
  end
  local found = vim.tbl_filter(function(word)
    return vim.startswith(word, lead)
  end, vim.tbl_keys(words))
  table.sort(found)
  return found
end

-- Says in one line how the daemon is.
function M.status()
  local notice = require('mlxbc.notice')
  require('mlxbc.connection').request({ type = 'status' }, function(reply)
    if reply.type == 'error' then
      return notice.of(reply, true)
    end
    local models = vim.tbl_map(function(model)
      return model.model
    end, reply.models)
    notice.say(('%s, %d running, %d queued, %s'):format(reply.state, reply.running, reply.queued, table.concat(models, ', ')))
  end)
end

return M
