-- Lists, replays or drops dead letters.
--
-- KEYS   [1] <prefix>state
-- ARGV   [1] consumer group, [2] 'list', 'replay' or 'drop'
--        list: [3] most letters, [4] the message id behind which to begin, or ''
--        replay, drop: [3...] message ids
-- Returns list: per letter {reason, time of death, {name, value, ...}}; replay, drop: how many there were

local refused = other_group(ARGV[1])
if refused then return refused end
local action = ARGV[2]

if action == 'list' then
  local rank = ARGV[4] ~= '' and call('ZRANK', prefix .. 'dead', ARGV[4])
  local first = rank and rank + 1 or 0
  local letters = {}
  for _, id in ipairs(call('ZRANGE', prefix .. 'dead', first, first + tonumber(ARGV[3]) - 1)) do
    letters[#letters + 1] = cmsgpack.unpack(call('HGET', prefix .. 'letters', id))
  end
  return letters
end

local count = 0
for at = 3, #ARGV do
  local id = ARGV[at]
  if call('ZREM', prefix .. 'dead', id) == 1 then
    count = count + 1
    local fields = cmsgpack.unpack(call('HGET', prefix .. 'letters', id))[3]
    call('HDEL', prefix .. 'letters', id)
    if action == 'replay' then
      set(fields, 'attempts', '0')
      call('ZADD', prefix .. 'live', get(fields, 'sent_ms'), id)
      enqueue(fields, now)
    end
  end
end
return count
