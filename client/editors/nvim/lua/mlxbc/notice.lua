-- Owns what the user is told, and how often.
local uv = vim.uv or vim.loop

local M = {}

local told = nil -- the trouble that has been spoken of
local again_at = 0

function M.say(text, level)
  vim.notify('mlxbc: ' .. text, level or vim.log.levels.INFO)
end

-- An error. What the user asked for always answers; what nobody asked for tells of one trouble once, until something
-- works again.
function M.of(message, asked)
  if asked then
    return M.say(message.message, vim.log.levels.ERROR)
  end
  local code = message.code or 'error'
  if code == 'absent' then
    again_at = uv.now() + 2000
  end
  -- Daemons come and go: one that is missing is worth a word, one that was restarted isn't.
  if code == 'shutting_down' or code == 'connection_lost' or code == told then
    return
  end
  told = code
  M.say(message.message, vim.log.levels.WARN)
end

function M.works()
  told, again_at = nil, 0
end

-- Without a daemon, looking for it at every key is pointless.
function M.may_try()
  return uv.now() >= again_at
end

return M
