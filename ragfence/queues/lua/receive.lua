-- Delivers messages of the lanes in turn: first those whose last delivery has expired, then new ones.
--
-- KEYS   [1] <prefix>state
-- ARGV   [1] consumer group, [2] consumer, [3] visibility in ms, [4] most messages, [5] most lanes,
--        [6] most delayed messages to move into their lanes
-- Returns {last entry of the bell, {per message: {entry, number of its deliveries, {name, value, ...}}}}

local refused = other_group(ARGV[1])
if refused then return refused end
local group, consumer, visibility = ARGV[1], ARGV[2], tonumber(ARGV[3])
local limit, most_lanes = tonumber(ARGV[4]), tonumber(ARGV[5])
local found = {}

for _, packed in ipairs(call('ZRANGEBYSCORE', prefix .. 'delayed', '-inf', now, 'LIMIT', 0, ARGV[6])) do
  call('ZREM', prefix .. 'delayed', packed)
  add(cmsgpack.unpack(packed))
end

-- XAUTOCLAIM knows one visibility. A delivery that was extended beyond it goes back to its consumer, uncounted.
local function returned(stream, entry)
  local held = call('HGET', prefix .. 'held', entry)
  if not held then return false end
  local till, count, owner = string.match(held, '^(%d+) (%d+) (.*)$')
  if tonumber(till) > now then
    call('XCLAIM', stream, group, owner, 0, entry, 'IDLE', 0, 'RETRYCOUNT', count, 'JUSTID')
    return true
  end
  call('HDEL', prefix .. 'held', entry)
  return false
end

local function take(lane, share)
  local stream, before = prefix .. 'lane:' .. lane, #found
  local cursor = call('HGET', prefix .. 'cursors', lane) or '0-0'
  local expired = call('XAUTOCLAIM', stream, group, consumer, visibility, cursor, 'COUNT', share)
  if expired[1] == '0-0' then
    call('HDEL', prefix .. 'cursors', lane)
  else
    call('HSET', prefix .. 'cursors', lane, expired[1])
  end
  for _, message in ipairs(expired[2]) do
    if message and not returned(stream, message[1]) then
      local pending = call('XPENDING', stream, group, message[1], message[1], 1)
      found[#found + 1] = { message[1], whole(pending[1][4]), message[2] }
    end
  end
  local left = share - (#found - before)
  if left > 0 then
    local new = call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', left, 'STREAMS', stream, '>')
    for _, message in ipairs(new and new[1][2] or {}) do
      call('HINCRBY', KEYS[1], 'in_flight', 1)
      found[#found + 1] = { message[1], '1', message[2] }
    end
  end
  return #found - before
end

local visits, hungry = math.min(call('LLEN', prefix .. 'lanes'), most_lanes), {}
for visit = 1, visits do
  if #found >= limit then break end
  local lane = call('LPOP', prefix .. 'lanes')
  if call('XLEN', prefix .. 'lane:' .. lane) == 0 then
    call('DEL', prefix .. 'lane:' .. lane)
    call('HDEL', prefix .. 'cursors', lane)
  else
    call('RPUSH', prefix .. 'lanes', lane)
    local share = math.ceil((limit - #found) / (visits - visit + 1))
    if take(lane, share) == share then hungry[#hungry + 1] = lane end
  end
end
-- What one lane does not use is left to the others.
for _, lane in ipairs(hungry) do
  if #found < limit then take(lane, limit - #found) end
end
-- When every lane was served, another one begins next time.
if visits > 1 and #hungry > 0 and call('LLEN', prefix .. 'lanes') == visits then
  call('LMOVE', prefix .. 'lanes', prefix .. 'lanes', 'LEFT', 'RIGHT')
end
local bell = call('XREVRANGE', prefix .. 'bell', '+', '-', 'COUNT', 1)
return { bell[1] and bell[1][1] or '0-0', found }
