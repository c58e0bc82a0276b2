-- Owns the chat buffer. The buffer is the conversation: what stands under its headings is what the model is sent, so
-- editing it edits the conversation.
local config = require('mlxbc.config')
local connection = require('mlxbc.connection')
local context = require('mlxbc.context')
local notice = require('mlxbc.notice')

local M = {}

M.YOU, M.MODEL = '─── you ───', '─── mlxbc ───'

local space = vim.api.nvim_create_namespace('mlxbc.chat')
local running = nil -- the answer that is being written

-- The messages under the headings, in order. A turn without text is left out.
function M.messages(lines)
  local messages, role, text = {}, nil, {}
  local function finish()
    local content = table.concat(text, '\n'):gsub('^%s+', ''):gsub('%s+$', '')
    if role and content ~= '' then
      messages[#messages + 1] = { role = role, content = context.utf8(content) }
    end
    text = {}
  end
  for _, line in ipairs(lines) do
    if line == M.YOU or line == M.MODEL then
      finish()
      role = line == M.YOU and 'user' or 'assistant'
    else
      text[#text + 1] = line
    end
  end
  finish()
  return messages
end

local function buffer()
  local found = vim.fn.bufnr('^mlxbc://chat$')
  if found ~= -1 and vim.api.nvim_buf_is_loaded(found) then
    return found
  end
  local made = vim.api.nvim_create_buf(true, false)
  vim.api.nvim_buf_set_name(made, 'mlxbc://chat')
  vim.bo[made].buftype = 'nofile'
  vim.bo[made].bufhidden = 'hide'
  vim.bo[made].swapfile = false
  vim.bo[made].filetype = 'markdown'
  vim.api.nvim_buf_set_lines(made, 0, -1, false, { M.YOU, '' })
  vim.keymap.set('n', '<CR>', M.send, { buffer = made, desc = 'mlxbc: send' })
  vim.keymap.set('n', '<C-c>', M.cancel, { buffer = made, desc = 'mlxbc: end the answer' })
  return made
end

-- Windows whose cursor is on the last line follow the text.
local function followers(chat)
  local last = vim.api.nvim_buf_line_count(chat)
  return vim.tbl_filter(function(window)
    return vim.api.nvim_win_get_cursor(window)[1] == last
  end, vim.fn.win_findbuf(chat))
end

local function follow(windows, chat)
  local last = vim.api.nvim_buf_line_count(chat)
  local column = #vim.api.nvim_buf_get_lines(chat, last - 1, last, false)[1]
  for _, window in ipairs(windows) do
    vim.api.nvim_win_set_cursor(window, { last, column })
  end
end

local function append(chat, text)
  local windows = followers(chat)
  local last = vim.api.nvim_buf_line_count(chat) - 1
  local column = #vim.api.nvim_buf_get_lines(chat, last, last + 1, false)[1]
  vim.api.nvim_buf_set_text(chat, last, column, last, column, vim.split(text, '\n', { plain = true }))
  follow(windows, chat)
end

local function insert(chat, at, text)
  local mark = vim.api.nvim_buf_get_extmark_by_id(chat, space, at, {})
  if not mark[1] then
    return append(chat, text)
  end
  local windows = followers(chat)
  vim.api.nvim_buf_set_text(chat, mark[1], mark[2], mark[1], mark[2], vim.split(text, '\n', { plain = true }))
  follow(windows, chat)
end

-- A passing remark behind the heading of the answer.
local function remark(mine, text)
  if not vim.api.nvim_buf_is_valid(mine.chat) then
    return
  end
  if mine.remark then
    vim.api.nvim_buf_del_extmark(mine.chat, space, mine.remark)
    mine.remark = nil
  end
  local mark = text and vim.api.nvim_buf_get_extmark_by_id(mine.chat, space, mine.heading, {})
  if mark and mark[1] then
    mine.remark = vim.api.nvim_buf_set_extmark(mine.chat, space, mark[1], 0, { virt_text = { { text, 'Comment' } } })
  end
end

local function finish(mine, text)
  running = nil
  remark(mine, text)
  if vim.api.nvim_buf_is_valid(mine.chat) then
    append(mine.chat, '\n\n' .. M.YOU .. '\n')
    vim.api.nvim_buf_del_extmark(mine.chat, space, mine.at)
  end
end

local function hear(mine, message)
  if running ~= mine then
    return
  end
  if not vim.api.nvim_buf_is_loaded(mine.chat) then
    running = nil
    return mine.call.cancel()
  end
  if message.type == 'accepted' then
    remark(mine, 'waiting')
  elseif message.type == 'progress' then
    local what = message.phase == 'load' and 'loading the model' or 'reading'
    remark(mine, ('%s, %d %%'):format(what, 100 * message.done / math.max(message.total, 1)))
  elseif message.type == 'token' and message.channel == 'reasoning' then
    remark(mine, 'thinking')
  elseif message.type == 'token' and message.channel == nil then
    if message.text ~= '' then
      remark(mine, nil)
      insert(mine.chat, mine.at, message.text)
    end
  elseif message.type == 'done' then
    notice.works()
    finish(mine, message.reason ~= 'stop' and message.reason or nil)
  elseif message.type == 'error' then
    finish(mine, message.message)
  end
end

-- Opens the chat; with a question, asks it.
function M.open(question)
  local chat = buffer()
  local windows = vim.fn.win_findbuf(chat)
  if windows[1] then
    vim.api.nvim_set_current_win(windows[1])
  else
    vim.cmd(config.values.chat.open)
    vim.api.nvim_win_set_buf(0, chat)
    vim.wo.wrap = true
    vim.wo.linebreak = true
  end
  if question and question ~= '' then
    if running then
      return notice.say('an answer is being written; wait, or end it with :Mlxbc cancel', vim.log.levels.WARN)
    end
    append(chat, question)
    M.send()
  end
  follow({ vim.api.nvim_get_current_win() }, chat)
end

-- Sends the conversation and writes the answer below it.
function M.send()
  local chat = buffer()
  if running then
    return notice.say('an answer is being written; wait, or end it with :Mlxbc cancel', vim.log.levels.WARN)
  end
  local messages = M.messages(vim.api.nvim_buf_get_lines(chat, 0, -1, false))
  if #messages == 0 or messages[#messages].role ~= 'user' then
    return notice.say('write your message below the last heading first', vim.log.levels.WARN)
  end
  local settings = config.values.chat
  if settings.system then
    table.insert(messages, 1, { role = 'system', content = settings.system })
  end
  append(chat, '\n\n' .. M.MODEL .. '\n')
  local last = vim.api.nvim_buf_line_count(chat) - 1
  local mine = { chat = chat }
  mine.heading = vim.api.nvim_buf_set_extmark(chat, space, last - 1, 0, {})
  mine.at = vim.api.nvim_buf_set_extmark(chat, space, last, 0, {})
  running = mine
  local message = { type = 'generate', messages = messages, model = settings.model, priority = 'interactive' }
  mine.call = connection.request(vim.tbl_extend('force', settings.fields, message), function(reply)
    hear(mine, reply)
  end)
end

-- Ends the answer that is being written; what came of it stays.
function M.cancel()
  if running then
    local mine = running
    mine.call.cancel()
    finish(mine, 'cancelled')
  end
end

return M
