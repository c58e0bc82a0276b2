-- Owns the connection to the daemon: one socket, msgpack frames, many requests at once.
--
-- It opens with the first request, and again with the first one after it was lost. Everything is asynchronous: libuv
-- reads and writes, handlers run on the main loop, and what came in one go is handled in one go.
local config = require('mlxbc.config')
local uv = vim.uv or vim.loop

local M = {}

local FRAME_CEILING = 2 ^ 24 - 1
local ABSENT = 'no daemon is running; start one with: mlxbc serve --detach'
local TERMINAL = { done = true, error = true, status_report = true }

local link = nil -- the open or opening connection
local last_id = 0

-- The socket, as the `mlxbc` command finds it.
function M.socket_path()
  local set = config.values.socket or vim.env.MLXBC_SOCKET
  if set and set ~= '' then
    return vim.fn.fnamemodify(vim.fn.expand(set), ':p')
  end
  if vim.fn.has('mac') == 1 then
    return uv.os_homedir() .. '/Library/Application Support/mlxbc/mlxbc.sock'
  end
  local uid = tostring(uv.getuid())
  local runtime = vim.env.XDG_RUNTIME_DIR
  local places = { '/run/user/' .. uid, (vim.env.TMPDIR or '/tmp') .. '/runtime-' .. uid }
  if runtime and runtime ~= '' then
    table.insert(places, 1, runtime)
  end
  for _, place in ipairs(places) do
    local path = place .. '/mlxbc/mlxbc.sock'
    if uv.fs_stat(path) then
      return path
    end
  end
  return places[1] .. '/mlxbc/mlxbc.sock'
end

local function frame(message)
  local body = vim.mpack.encode(message)
  local size = #body
  if size > FRAME_CEILING then
    return nil
  end
  local header = string.char(0, math.floor(size / 65536) % 256, math.floor(size / 256) % 256, size % 256)
  return header .. body
end

-- Handlers run on the main loop, in order, as many as there are at a time.
local function hand_out(self)
  if self.handing_out then
    return
  end
  self.handing_out = true
  vim.schedule(function()
    self.handing_out = false
    local inbox = self.inbox
    self.inbox = {}
    for _, message in ipairs(inbox) do
      local call = message.id and self.calls[message.id]
      if call then
        if TERMINAL[message.type] then
          self.calls[message.id] = nil
        end
        call.heard = true
        call.handler(message)
      end
    end
    if self.lost then
      local calls = self.calls
      self.calls = {}
      for id, call in pairs(calls) do
        call.handler({
          type = 'error',
          id = id,
          code = self.code or 'connection_lost',
          message = self.lost,
          -- Nothing came of it yet, so asking again is the same as having asked later.
          again = self.greeted and not call.heard,
        })
      end
    end
  end)
end

local function lose(self, message, code)
  if self.lost then
    return
  end
  self.lost, self.code = message, code
  if link == self then
    link = nil
  end
  if not self.pipe:is_closing() then
    self.pipe:close()
  end
  hand_out(self)
end

local function receive(self, data)
  self.buffer = self.buffer .. data
  local at = 1
  while #self.buffer - at + 1 >= 4 do
    local a, b, c, d = self.buffer:byte(at, at + 3)
    local size = ((a * 256 + b) * 256 + c) * 256 + d
    if #self.buffer - at + 1 < 4 + size then
      break
    end
    local fine, message = pcall(vim.mpack.decode, self.buffer:sub(at + 4, at + 3 + size))
    if not fine or type(message) ~= 'table' then
      return lose(self, 'cannot read what the daemon says; install one version of both')
    end
    at = at + 4 + size
    if message.type == 'welcome' then
      self.greeted = true
    elseif message.type == 'error' and message.id == nil then
      return lose(self, message.message, message.code)
    else
      self.inbox[#self.inbox + 1] = message
    end
  end
  self.buffer = self.buffer:sub(at)
  if #self.inbox > 0 then
    hand_out(self)
  end
end

local function open()
  local self = { calls = {}, inbox = {}, buffer = '', waiting = {}, pipe = uv.new_pipe(false) }
  link = self
  local path = M.socket_path()
  local stat = uv.fs_stat(path)
  if stat and stat.uid ~= uv.getuid() then
    lose(self, 'the socket ' .. path .. " is another user's; set MLXBC_SOCKET to your own", 'absent')
    return self
  end
  self.pipe:connect(path, function(failed)
    if failed then
      return lose(self, ABSENT, 'absent')
    end
    self.pipe:read_start(function(broken, data)
      if broken or not data then
        lose(self, 'the connection to the daemon ended before the request did; ask again')
      else
        receive(self, data)
      end
    end)
    local waiting = self.waiting
    self.waiting = nil
    self.pipe:write(table.concat(waiting))
  end)
  self.waiting[1] = frame({ type = 'hello', proto = 1, client = 'mlxbc.nvim' })
  return self
end

local function send(self, message)
  local data = frame(message)
  if not data then
    return false
  end
  if self.waiting then
    self.waiting[#self.waiting + 1] = data
  elseif not self.pipe:is_closing() then
    self.pipe:write(data)
  end
  return true
end

-- Sends a request without its id. `handler` hears every message that answers it, on the main loop; the last one is
-- `done`, `error` or the one reply. A request that the daemon never began to answer because it was restarted is sent
-- once more by itself.
--
-- Returns a call: `call.cancel()` ends it on the daemon and silences its handler.
function M.request(message, handler)
  local call = { handler = nil, heard = false }
  local silent, sent_again = false, false
  local owner

  local function start()
    last_id = last_id + 1
    call.id = last_id
    owner = link or open()
    owner.calls[call.id] = call
    local numbered = vim.tbl_extend('force', message, { id = call.id })
    if not send(owner, numbered) then
      owner.calls[call.id] = nil
      vim.schedule(function()
        call.handler({ type = 'error', code = 'frame_too_large', message = 'the request is too large; send less text' })
      end)
    end
  end

  call.handler = function(reply)
    if silent then
      return
    end
    if reply.again and not sent_again then
      sent_again = true
      return start()
    end
    handler(reply)
  end

  call.cancel = function()
    if silent then
      return
    end
    silent = true
    if owner.calls[call.id] and not owner.lost then
      send(owner, { type = 'cancel', id = call.id })
    end
  end

  start()
  return call
end

-- Ends the connection; the daemon cancels what still runs on it.
function M.close()
  if link then
    lose(link, 'the connection was closed')
  end
end

return M
