-- Sends messages, all or none.
--
-- KEYS   [1] <prefix>state
-- ARGV   [1] consumer group, [2] high-water mark, [3] delay in ms, [4] number of messages,
--        then per message: the number of its names and values, and those
-- Returns {1 if they were sent and 0 if the queue is full, number of messages in the queue before}

local refused = other_group(ARGV[1])
if refused then return refused end
local high_water, due, count = tonumber(ARGV[2]), now + tonumber(ARGV[3]), tonumber(ARGV[4])
local live = call('ZCARD', prefix .. 'live')
if live + count > high_water then return { 0, live } end
local at = 5
for _ = 1, count do
  local size, fields = tonumber(ARGV[at]), {}
  for each = 1, size do fields[each] = ARGV[at + each] end
  at = at + 1 + size
  set(fields, 'sent_ms', whole(now))
  -- A call that is repeated because its reply was lost finds its messages here.
  if call('ZADD', prefix .. 'live', 'NX', now, get(fields, 'id')) == 1 then enqueue(fields, due) end
end
return { 1, live }
