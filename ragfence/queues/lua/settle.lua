-- Ends or extends deliveries: compares owner and delivery, then acts. A delivery that another one followed changes nothing.
--
-- KEYS   [1] <prefix>state
-- ARGV   [1] consumer group, [2] 'ack', 'retry', 'extend' or 'dead'
--        [3] retry: delay in ms; extend: for how many ms; dead: the reason; ack: ''
--        [4] retry: '1' if the delivery counts as an attempt; extend: the queue's visibility in ms; else ''
--        then per delivery: lane, entry, number of its deliveries, consumer, message id
-- Returns, per delivery, in order: 1 done | 0 the delivery is not, or no longer, the caller's

local group, action, option, more = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

-- The fields of the message, if this delivery of it is the last one.
local function held(stream, entry, count, consumer, message_id)
  if call('EXISTS', stream) == 0 then return nil end
  local pending = call('XPENDING', stream, group, entry, entry, 1)[1]
  if not pending or pending[2] ~= consumer or pending[4] ~= count then return nil end
  local message = call('XRANGE', stream, entry, entry)[1]
  if not message or get(message[2], 'id') ~= message_id then return nil end
  return message[2]
end

local function extend(stream, entry, count, consumer)
  local wanted, visibility = tonumber(option), tonumber(more)
  call('XCLAIM', stream, group, consumer, 0, entry, 'IDLE', whole(math.max(0, visibility - wanted)), 'JUSTID')
  if wanted > visibility then
    call('HSET', prefix .. 'held', entry, whole(now + wanted) .. ' ' .. whole(count) .. ' ' .. consumer)
  else
    call('HDEL', prefix .. 'held', entry)
  end
end

local function settle(stream, entry, count, fields)
  call('XACK', stream, group, entry)
  call('XDEL', stream, entry)
  call('HDEL', prefix .. 'held', entry)
  call('HINCRBY', KEYS[1], 'in_flight', -1)
  if action == 'retry' then
    local attempts = (tonumber(get(fields, 'attempts')) or 0) + count
    set(fields, 'attempts', whole(more == '1' and attempts or attempts - 1))
    put(fields, now + tonumber(option)) -- its group stays its own
    return
  end
  local id = get(fields, 'id')
  call('ZREM', prefix .. 'live', id)
  if action == 'dead' then
    set(fields, 'attempts', whole((tonumber(get(fields, 'attempts')) or 0) + count))
    call('ZADD', prefix .. 'dead', call('HINCRBY', KEYS[1], 'deaths', 1), id)
    call('HSET', prefix .. 'letters', id, cmsgpack.pack({ option, whole(now), fields }))
  end
  next_of(get(fields, 'group'))
end

local replies = {}
for at = 5, #ARGV, 5 do
  local stream, entry, count, consumer = prefix .. 'lane:' .. ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local fields = held(stream, entry, count, consumer, ARGV[at + 4])
  if fields and action == 'extend' then
    extend(stream, entry, count, consumer)
  elseif fields then
    settle(stream, entry, count, fields)
  end
  replies[#replies + 1] = fields and 1 or 0
end
return replies
