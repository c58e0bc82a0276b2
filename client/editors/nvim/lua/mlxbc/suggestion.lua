-- Owns a suggestion's text: what has come of it, what the user has typed of it, and what accepting a part of it takes.
local M = {}
M.__index = M

function M.new()
  -- `rest` is what would follow the cursor. `ahead` is what the user typed beyond what has come.
  return setmetatable({ rest = '', ahead = '', ended = false }, M)
end

-- More of it came. False if it isn't what the user has typed meanwhile.
function M:feed(text)
  local common = math.min(#text, #self.ahead)
  if text:sub(1, common) ~= self.ahead:sub(1, common) then
    return false
  end
  self.ahead = self.ahead:sub(common + 1)
  self.rest = self.rest .. text:sub(common + 1)
  return true
end

-- The user typed `text`. False if the suggestion says something else.
function M:type(text)
  local common = math.min(#text, #self.rest)
  if text:sub(1, common) ~= self.rest:sub(1, common) then
    return false
  end
  self.rest = self.rest:sub(common + 1)
  self.ahead = self.ahead .. text:sub(common + 1)
  return not (self.ended and self.ahead ~= '')
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
  return self.ahead == ''
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
