-- Markers and hydration. Every write compares the marker first, so a hydration that was overtaken does nothing.
--
-- KEYS   the markers of the shards; then, after a single marker:
--        'load', 'forget_ended' and 'forget_pending': the records
--        'recount': the count of head moves, then records and sources
-- ARGV   [1] what to do:
--            'begin', 'load', 'finish'   the steps of a hydration
--            'forget'                    delete the markers of older epochs
--            'forget_ended'              delete ended records
--            'forget_pending'            delete those, and pending records without a live lease
--            'recount'                   put back what is pending, and the number of documents if it was counted
--        [2] the epoch; 'forget_ended' also deletes parked records of lower epochs
--        'load': the values, in the order of KEYS
--        'recount': the count of head moves at which documents were counted, and their number, or ''
-- Returns 1 done | 0 the markers are not in the state that the step needs

local action, epoch = ARGV[1], tonumber(ARGV[2])
local run = run_id()

local function hydrating(marker_key)
  local m = read_marker(marker_key)
  -- Also the run: a server that restarted meanwhile may have lost what was loaded before.
  return m and not m.ready and m.epoch == epoch and m.run == run
end

-- The live document in a source record of this epoch: 1, or 0.
local function live(data)
  if not data or byte(data) ~= $RECORD_VERSION or sub(data, $source.stamp) ~= $pack(source.stamp, epoch) then return 0 end
  return $has(byte(data, $source.flags.at), SOURCE_LIVE) and 1 or 0
end

if action == 'begin' then
  for _, marker_key in ipairs(KEYS) do
    local m = read_marker(marker_key)
    if m and m.epoch >= epoch then return 0 end
  end
  for _, marker_key in ipairs(KEYS) do
    local prefix, now_ms = sub(marker_key, 1, -2), now()
    write_marker(marker_key, $HYDRATING, epoch, run)
    if redis.call('EXISTS', prefix .. 'c') == 0 then
      -- There are no counts: the store is new, or lost them. See BEGUN in core/tallies.py.
      local key = prefix .. 'h' .. math.floor(now_ms / $DAY_MS)
      redis.call('HSET', key, math.floor(now_ms / $HOUR_MS) .. ':b-\0\0', string.format('%.0f', now_ms))
      redis.call('PEXPIRE', key, $KEPT_MS)
    end
    -- Leases of earlier epochs are void, and documents are counted as they are loaded.
    redis.call('DEL', prefix .. 'q')
    redis.call('HSET', prefix .. 'c', 'e', ARGV[2], 'm', redis.call('GET', prefix .. 'v') or '0', 'd', 0)
  end
elseif action == 'load' then
  if not hydrating(KEYS[1]) then return 0 end
  local prefix, documents = sub(KEYS[1], 1, -2), 0
  for i = 2, #KEYS do
    local value = ARGV[i + 1]
    if byte(KEYS[i], #prefix + 1) == $code(s) then
      -- After a lost reply it is loaded again.
      documents = documents + live(value) - live(redis.call('SET', KEYS[i], value, 'GET'))
    else
      redis.call('SET', KEYS[i], value)
    end
  end
  if documents ~= 0 then redis.call('HINCRBY', prefix .. 'c', 'd', documents) end
elseif action == 'finish' then
  for _, marker_key in ipairs(KEYS) do
    if not hydrating(marker_key) then return 0 end
  end
  for _, marker_key in ipairs(KEYS) do write_marker(marker_key, $READY, epoch, run) end
elseif action == 'forget_ended' or action == 'forget_pending' then
  for i = 2, #KEYS do
    local data = redis.call('GET', KEYS[i]) or ''
    local version, state = byte(data, $record.version:state)
    if version == $RECORD_VERSION and ($state(state) == SEALED or $state(state) == FAILED) then
      local sealed_ms, left_ms = $unpack(record.when, data), redis.call('PTTL', KEYS[i])
      local lifetime = left_ms > 0 and math.max(now() + left_ms - sealed_ms, 1) or 0
      redis.call('DEL', KEYS[i])
      tally(sub(KEYS[1], 1, -2), sealed_ms, label('x', lifetime, $short(data, $record.rest), '', 1), 1)
    elseif version == $RECORD_VERSION and action == 'forget_pending'
        and (($state(state) ~= HELD and $state(state) ~= LOCKED) or now() >= $unpack(record.when, data)) then
      local prefix = sub(KEYS[1], 1, -2)
      redis.call('DEL', KEYS[i])
      redis.call('ZREM', prefix .. 'p', sub(KEYS[i], #prefix + 2))
    elseif version == 0 then  -- parked: it starts with the stamp, whose first byte is 0
      if $unpack(parked.stamp, data) < epoch then redis.call('DEL', KEYS[i]) end
    end
  end
elseif action == 'recount' then
  local m, prefix = read_marker(KEYS[1]), sub(KEYS[1], 1, -2)
  for i = 3, #KEYS do
    local data, left_ms = redis.call('GET', KEYS[i]), redis.call('PTTL', KEYS[i])
    local of_source = byte(KEYS[i], #prefix + 1) == $code(s)
    local state = data and byte(data) == $RECORD_VERSION and $state(byte(data, $record.state.at))
    local is_pending = state and (state <= QUARANTINED or state == LOCKED)
    if of_source then
      is_pending = data and byte(data) == $RECORD_VERSION and $has(byte(data, $source.flags.at), SOURCE_LEASE)
    end
    if is_pending then
      redis.call('ZADD', prefix .. (of_source and 'q' or 'p'), score(now(), left_ms), sub(KEYS[i], #prefix + 2))
    end
  end
  if ARGV[4] == '' then return 1 end
  if not m or m.epoch ~= epoch or (redis.call('GET', KEYS[2]) or '0') ~= ARGV[3] then return 0 end
  redis.call('HSET', prefix .. 'c', 'e', ARGV[2], 'm', ARGV[3], 'd', ARGV[4])
else
  for _, marker_key in ipairs(KEYS) do
    local m = read_marker(marker_key)
    if m and m.ready and m.epoch < epoch then redis.call('DEL', marker_key) end
  end
end
return 1
