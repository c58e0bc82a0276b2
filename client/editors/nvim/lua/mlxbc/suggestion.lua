-- Owns a suggestion's text: what has come of it, what the user has typed of it, and what accepting a part of it takes.
-- `rest` is what would follow the cursor.
local M = {}
M.__index = M

function M.new()
  return setmetatable({ rest = '', ended = false }, M)
end

-- More of it came.
function M:feed(text)
  self.rest = self.rest .. text
end

-- The user typed `text`. False if the suggestion says something else, or has nothing more to say.
function M:type(text)
  if self.rest:sub(1, #text) ~= text then
    return false
  end
  self.rest = self.rest:sub(#text + 1)
  return self.rest ~= '' or not self.ended
end

-- Nothing more will come. A suggestion of several lines that was cut off ends with its last whole line; what stands
-- behind the cursor already is not suggested again.
function M:finish(cut, behind)
  self.ended = true
  if cut and self.rest:find('\n', 1, true) then
    self.rest = self.rest:gsub('\n[^\n]*$', '')
  end
  self.rest = self.rest:gsub('%s+$', '')
  if behind ~= '' and self.rest:sub(-#behind) == behind then
    self.rest = self.rest:sub(1, -#behind - 1)
  end
end

-- Removes and returns the next word, the next line, or all of it.
function M:take(part)
  local taken = self.rest
  if part == 'line' then
    taken = self.rest:match('^\n?[^\n]*')
  elseif part == 'word' then
    taken = self.rest:match('^%s*[%w_\128-\255]+') or self.rest:match('^%s*[^%w_%s]+') or self.rest
  end
  self.rest = self.rest:sub(#taken + 1)
  return taken
end

return M
