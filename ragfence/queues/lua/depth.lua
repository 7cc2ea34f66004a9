-- Counts the messages of a queue. Its cost does not grow with them.
--
-- KEYS   [1] <prefix>state
-- Returns {not acknowledged, in flight, dead, age of the oldest in ms or -1}

local oldest = call('ZRANGE', prefix .. 'live', 0, 0, 'WITHSCORES')
return {
  call('ZCARD', prefix .. 'live'),
  tonumber(call('HGET', KEYS[1], 'in_flight') or '0'),
  call('ZCARD', prefix .. 'dead'),
  oldest[2] and math.max(0, now - tonumber(oldest[2])) or -1,
}
