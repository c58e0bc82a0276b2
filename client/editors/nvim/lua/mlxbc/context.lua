-- Owns what the model sees of the buffers, and the completion request that is made of it.
local config = require('mlxbc.config')

local M = {}

-- Text as UTF-8: the daemon refuses anything else, and a buffer may hold any bytes.
function M.utf8(text)
  if not text:find('[\128-\255]') then
    return text
  end
  local out, at, size = {}, 1, #text
  while at <= size do
    local plain = text:match('^[%z\1-\127]+', at)
    if plain then
      out[#out + 1] = plain
      at = at + #plain
    else
      local first, second = text:byte(at, at + 1)
      local tail = (first >= 0xC2 and first <= 0xDF and 1)
        or (first >= 0xE0 and first <= 0xEF and 2)
        or (first >= 0xF0 and first <= 0xF4 and 3)
      local whole = tail and text:match('^' .. ('[\128-\191]'):rep(tail), at + 1)
      -- Overlong forms, surrogates, and what lies beyond Unicode.
      if
        whole
        and (
          (first == 0xE0 and second < 0xA0)
          or (first == 0xED and second > 0x9F)
          or (first == 0xF0 and second < 0x90)
          or (first == 0xF4 and second > 0x8F)
        )
      then
        whole = nil
      end
      out[#out + 1] = whole and text:sub(at, at + tail) or '\239\191\189'
      at = at + 1 + (whole and tail or 0)
    end
  end
  return table.concat(out)
end

local function lines(buffer, first, last)
  return M.utf8(table.concat(vim.api.nvim_buf_get_lines(buffer, math.max(first, 0), last, false), '\n'))
end

-- However long lines are, no more bytes than these are sent of each part.
M.PREFIX, M.SUFFIX, M.CHUNK = 32768, 8192, 8192

-- The last `limit` bytes, or somewhat less: the beginning moves in steps, as with lines.
local function tail(text, limit)
  local step = limit / 2
  local cut = math.ceil((#text - limit) / step) * step
  return cut > 0 and (text:sub(cut + 1):gsub('^[\128-\191]+', '')) or text
end

local function head(text, limit)
  return #text > limit and (text:sub(1, limit):gsub('[\192-\255][\128-\191]*$', '')) or text
end

local function path_of(buffer)
  return M.utf8(vim.fn.fnamemodify(vim.api.nvim_buf_get_name(buffer), ':.'))
end

-- What the other visible buffers show around their cursors.
local function elsewhere(buffer)
  local chunks, seen = {}, { [buffer] = true }
  local around = math.floor(config.values.completion.lines_elsewhere / 2)
  for _, window in ipairs(vim.api.nvim_tabpage_list_wins(0)) do
    local other = vim.api.nvim_win_get_buf(window)
    if around > 0 and not seen[other] and vim.bo[other].buftype == '' and path_of(other) ~= '' then
      seen[other] = true
      -- Moving a little must not change the chunk: the daemon keeps what it has read of a prompt's beginning.
      local middle = math.floor(vim.api.nvim_win_get_cursor(window)[1] / around) * around
      local text = lines(other, middle - around, middle + around)
      if text:find('%S') then
        chunks[#chunks + 1] = { path = path_of(other), text = head(text, M.CHUNK) }
      end
    end
  end
  return chunks
end

-- The text around position (`row`, `column`), both from 0, as the fields of `fim`, and what stands behind the cursor in
-- its line.
function M.around(buffer, row, column)
  local settings = config.values.completion
  -- The beginning moves in steps: one that moved with every line would make the daemon read all of it anew.
  local step = math.max(1, math.floor(settings.lines_before / 2))
  local first = math.max(0, math.ceil((row - settings.lines_before) / step) * step)
  local line = vim.api.nvim_buf_get_lines(buffer, row, row + 1, false)[1] or ''
  local before, behind = line:sub(1, column), line:sub(column + 1)
  local prefix = row > first and lines(buffer, first, row) .. '\n' or ''
  local suffix = lines(buffer, row + 1, row + 1 + settings.lines_after)
  local fim = {
    prefix = tail(prefix .. M.utf8(before), M.PREFIX),
    suffix = head(M.utf8(behind) .. (suffix ~= '' and '\n' .. suffix or ''), M.SUFFIX),
  }
  if path_of(buffer) ~= '' then
    fim.path = path_of(buffer)
  end
  if vim.bo[buffer].filetype ~= '' then
    fim.language = vim.bo[buffer].filetype
  end
  local chunks = elsewhere(buffer)
  if #chunks > 0 then
    fim.context = chunks
  end
  -- In the middle of a line a suggestion of several lines could not be shown where it would go.
  if behind:find('%S') then
    fim.single_line = true
  end
  return fim, behind
end

-- The request for a completion.
function M.request(fim)
  local settings = config.values.completion
  return {
    type = 'generate',
    supersede = 'completion',
    priority = 'interactive',
    deadline_ms = settings.deadline_ms,
    max_tokens = settings.max_tokens,
    temperature = 0,
    model = settings.model,
    fim = fim,
  }
end

return M
