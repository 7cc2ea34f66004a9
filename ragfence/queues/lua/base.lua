-- Shared by the scripts of a queue. Each is one atomic step.
--
-- KEYS   [1] <prefix>state: a hash with the group, the last entry id and the number of deliveries in flight
-- The other keys have the same prefix, and so the same hash tag and slot:
--   lane:<tenant>   stream of the messages that can be delivered, with one consumer group
--   lanes           list of the lanes that have a stream, the next one to serve first
--   cursors         hash: where the next XAUTOCLAIM of a lane continues
--   delayed         sorted set of packed messages, by the time at which they are due
--   live            sorted set of the ids of all messages that are not acknowledged or dead, by the time of sending
--   held            hash: entry -> 'until consumer deliveries', of what was extended beyond the queue's visibility
--   groups          set of the groups that have a message which is not settled
--   group:<name>    list of the packed messages that wait behind it
--   dead, letters   sorted set of dead message ids in the order they died, and the hash that holds them
--   bell            stream of one entry, which wakes consumers that wait

if redis.replicate_commands then redis.replicate_commands() end -- Redis 6 refuses writes after TIME without it

local call, prefix = redis.call, string.sub(KEYS[1], 1, -6)

local function whole(number) return string.format('%.0f', number) end

local function clock()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local now = clock()

-- The fields of a message are a flat list: name, value, name, value. Empty ones are left out.
local function get(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then return fields[at + 1] end
  end
  return ''
end

local function set(fields, name, value)
  for at = 1, #fields, 2 do
    if fields[at] == name then
      fields[at + 1] = value
      return
    end
  end
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end

-- A queue has one consumer group: a second one would get messages that the first has acknowledged, or none.
local function other_group(group)
  if call('HSETNX', KEYS[1], 'group', group) == 1 then return nil end
  local mine = call('HGET', KEYS[1], 'group')
  if mine ~= group then return redis.error_reply('OTHERGROUP ' .. mine) end
  return nil
end

local function ring() call('XADD', prefix .. 'bell', 'MAXLEN', 1, '*', 'n', 1) end

-- Entry ids are numbers of the queue, never of the clock: a lane that was removed and made again repeats none.
local function add(fields)
  local lane = get(fields, 'tenant')
  local stream = prefix .. 'lane:' .. lane
  if call('EXISTS', stream) == 0 then
    call('XGROUP', 'CREATE', stream, call('HGET', KEYS[1], 'group'), '0', 'MKSTREAM')
    call('RPUSH', prefix .. 'lanes', lane)
  end
  call('XADD', stream, call('HINCRBY', KEYS[1], 'entry', 1) .. '-0', unpack(fields))
  ring()
end

local function put(fields, due)
  if due > now then
    call('ZADD', prefix .. 'delayed', due, cmsgpack.pack(fields))
  else
    add(fields)
  end
end

-- A message of a group enters its lane only when the one in front of it is settled.
local function enqueue(fields, due)
  local group = get(fields, 'group')
  if group ~= '' and call('SADD', prefix .. 'groups', group) == 0 then
    call('RPUSH', prefix .. 'group:' .. group, cmsgpack.pack({ whole(due), fields }))
  else
    put(fields, due)
  end
end

local function next_of(group)
  if group == '' then return end
  local packed = call('LPOP', prefix .. 'group:' .. group)
  if packed then
    local waiting = cmsgpack.unpack(packed)
    put(waiting[2], tonumber(waiting[1]))
  else
    call('SREM', prefix .. 'groups', group)
  end
end
