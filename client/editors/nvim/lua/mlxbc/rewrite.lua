-- Owns rewriting lines of a buffer: an instruction and the lines go out, the answer takes the lines' place.
local config = require('mlxbc.config')
local connection = require('mlxbc.connection')
local context = require('mlxbc.context')
local notice = require('mlxbc.notice')

local M = {}

local SYSTEM = 'You edit text. You are given an instruction and a text. Answer with the edited text alone: no '
  .. 'explanation, no code fence, the same indentation.'

local space = vim.api.nvim_create_namespace('mlxbc.rewrite')
local running = {}

-- The text of an answer without the code fence that models like to put around it.
function M.bare(answer)
  local text = answer:gsub('^%s*\n', ''):gsub('%s+$', '')
  local inside = text:match('^%s*```[^\n]*\n(.*)\n%s*```$')
  return inside or text:match('^%s*```[^\n]*\n%s*```$') and '' or text
end

local function finish(mine)
  running[mine] = nil
  if vim.api.nvim_buf_is_valid(mine.buffer) then
    vim.api.nvim_buf_del_extmark(mine.buffer, space, mine.mark)
  end
end

-- The lines now, wherever they are after edits elsewhere: first and last, from 0, the last one left out.
local function range(mine)
  local mark = vim.api.nvim_buf_get_extmark_by_id(mine.buffer, space, mine.mark, { details = true })
  return mark[1], mark[1] and mark[3].end_row
end

local function remark(mine, text)
  local first, last = range(mine)
  if first then
    vim.api.nvim_buf_set_extmark(mine.buffer, space, first, 0, {
      id = mine.mark,
      end_row = last,
      end_col = 0,
      hl_group = 'Visual',
      virt_text = { { '  ' .. text, 'Comment' } },
      strict = false,
    })
  end
end

local function replace(mine)
  local text = M.bare(table.concat(mine.answer))
  local first, last = range(mine)
  finish(mine)
  local lines = first and vim.api.nvim_buf_get_lines(mine.buffer, first, last, false) or {}
  if table.concat(lines, '\n') ~= mine.before then
    vim.fn.setreg('"', text, 'V')
    return notice.say('the lines were changed meanwhile; the answer is in the unnamed register', vim.log.levels.WARN)
  end
  vim.api.nvim_buf_set_lines(mine.buffer, first, last, false, vim.split(text, '\n', { plain = true }))
end

local function hear(mine, message)
  if not running[mine] then
    return
  end
  if not vim.api.nvim_buf_is_loaded(mine.buffer) then
    running[mine] = nil
    return mine.call.cancel()
  end
  if message.type == 'token' and message.channel == nil then
    mine.answer[#mine.answer + 1] = message.text
    mine.tokens = mine.tokens + (message.n or 1)
    remark(mine, ('rewriting, %d tokens'):format(mine.tokens))
  elseif message.type == 'done' then
    notice.works()
    if message.reason == 'stop' then
      return replace(mine)
    end
    finish(mine)
    notice.say('the answer was cut (' .. message.reason .. '); the lines stay as they are', vim.log.levels.WARN)
  elseif message.type == 'error' then
    finish(mine)
    notice.of(message, true)
  end
end

-- Rewrites lines `first` to `last`, counted from 1, of the current buffer.
function M.run(first, last, instruction)
  if instruction == '' then
    return notice.say("say what to do: :'<,'>Mlxbc rewrite add a docstring", vim.log.levels.ERROR)
  end
  local buffer = vim.api.nvim_get_current_buf()
  local before = table.concat(vim.api.nvim_buf_get_lines(buffer, first - 1, last, false), '\n')
  local mine = { buffer = buffer, before = before, answer = {}, tokens = 0 }
  mine.mark = vim.api.nvim_buf_set_extmark(buffer, space, first - 1, 0, { end_row = last, end_col = 0, strict = false })
  running[mine] = true
  remark(mine, 'rewriting')
  local name = vim.fn.fnamemodify(vim.api.nvim_buf_get_name(buffer), ':t')
  local text = ('Instruction: %s\n\n%s\n%s'):format(instruction, name ~= '' and 'Text, from ' .. name .. ':' or 'Text:', before)
  local settings = config.values.rewrite
  local message = {
    type = 'generate',
    messages = { { role = 'system', content = SYSTEM }, { role = 'user', content = context.utf8(text) } },
    model = settings.model,
    priority = 'interactive',
  }
  mine.call = connection.request(vim.tbl_extend('force', settings.fields, message), function(reply)
    hear(mine, reply)
  end)
end

-- Ends every rewriting; the lines stay as they are.
function M.cancel()
  for mine in pairs(running) do
    mine.call.cancel()
    finish(mine)
  end
end

return M
