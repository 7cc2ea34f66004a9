-- Renewals, releases and resets of attempts: compares the token, then acts, as apply_renewal, apply_release and
-- apply_attempt_reset of core/decisions.py do.
--
-- KEYS   per group: marker, rows; then per lease: record, and source unless the mode is KEYED or LOCK
-- ARGV   [1] '1' if there is no object store, [2] number of groups, [3] most rows to keep, or '0'
--        [4] 'renew', 'release', 'expire' or 'reset_attempts', [5] the error code of a release,
--        [6] '1' if a release refunds the attempt, '2' if it also keeps nothing of a first attempt
--        per group: the shard as one byte, the number of leases; then per lease one packed string (see pack_lease in codec.py)
-- Returns, per lease, in order: 1 done | 0 the lease is not (or no longer) held | a record of a newer format

local function unpack_lease(data)
  local l = {}
  local at
  l.mode, l.token, l.digest, l.epoch, l.lease_ms, l.pending_ttl, l.source_ttl, at =
    $unpack(lease, data)
  l.context, at = read_long(data, at)
  return l
end

-- The pending record of the lease, and where it is stored: {record, lease of its source or nil}.
local function find(lease, held)
  if lease.mode == LOCK then
    return held.record and held.record.state == LOCKED and held.record or nil, nil
  end
  if lease.mode == KEYED then return held.record, nil end
  local spot = held.source and held.source.lease
  if spot and spot.digest == lease.digest then return spot.record, spot end
  return nil, nil
end

local function put_back(lease, held, record, spot)
  if not spot then
    put(lease.record_key, record.raw, lease.pending_ttl)
    redis.call('ZADD', lease.prefix .. 'p', score(lease.now_ms, lease.pending_ttl), lease.digest)
    return
  end
  held.source.lease = { digest = lease.digest, record = record, unsettled = spot.unsettled }
  put(lease.source_key, encode_source(held.source), lease.source_ttl)
  redis.call('ZADD', lease.prefix .. 'q', score(lease.now_ms, lease.source_ttl), sub(lease.source_key, #lease.prefix + 2))
end

-- Of a lock nothing stays but the counter of its shard.
local function drop_lock(lease)
  redis.call('DEL', lease.record_key)
  redis.call('ZREM', lease.prefix .. 'p', lease.digest)
  return 1
end

local function reset_attempts(lease, held, now_ms)
  local record, spot = find(lease, held)
  if lease.mode == LOCK then return record and drop_lock(lease) or 0 end
  if spot then
    local hides = record.state == HELD or spot.unsettled
    put_back(lease, held,
      copy_record(record, { state = hides and HELD or RELEASED, token = NOBODY, when = now_ms, attempt = 0 }), spot)
    return 1
  end
  if not held.record or ended(held.record) or held.record.state == LOCKED then return 0 end
  local after = copy_record(held.record, { state = RELEASED, token = NOBODY, when = now_ms, attempt = 0 })
  put_back(lease, held, after, nil)
  return 1
end

-- Nothing is kept of a first attempt that was declined.
local function withdrawn(lease, held, record, spot)
  if lease.mode ~= DOCUMENT or record.attempt ~= 1 or spot.unsettled or not held.source.head then return false end
  held.source.lease = nil
  put(lease.source_key, encode_source(held.source), lease.source_ttl)
  redis.call('ZREM', lease.prefix .. 'q', sub(lease.source_key, #lease.prefix + 2))
  return true
end

local function settle(action, lease, held, epoch, now_ms, err, refund, withdraw)
  if action == 'reset_attempts' then return reset_attempts(lease, held, now_ms), nil end
  local record, spot = find(lease, held)
  if not record or record.state ~= (lease.mode == LOCK and LOCKED or HELD) or record.token ~= lease.token then
    return 0, nil
  end
  if action == 'renew' then
    if lease.epoch ~= epoch then return 0, nil end
    put_back(lease, held, copy_record(record, { when = now_ms + lease.lease_ms }), spot)
    return 1, nil
  end
  if lease.mode == LOCK then return drop_lock(lease), record end
  if withdraw and withdrawn(lease, held, record, spot) then return 1, record end
  local state = action == 'expire' and HELD or RELEASED
  local attempt = refund and math.max(record.attempt - 1, 0) or record.attempt
  put_back(lease, held, copy_record(record, { state = state, when = now_ms, error = err, attempt = attempt }), spot)
  return 1, record
end

local solo, groups, most_rows, action, err = ARGV[1] == '1', tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local refund, withdraw = ARGV[6] ~= '0', ARGV[6] == '2'
local run, now_ms = run_id(), now()
local replies, k, a = {}, 1, 7
for _ = 1, groups do
  local marker_key, rows_key = KEYS[k], KEYS[k + 1]
  local shard, count = ARGV[a], tonumber(ARGV[a + 1])
  k, a = k + 2, a + 2
  local rows = {}
  local epoch = usable_epoch(marker_key, run, solo, now_ms)
  for _ = 1, count do
    local lease = unpack_lease(ARGV[a])
    a = a + 1
    lease.record_key, lease.prefix, lease.now_ms = KEYS[k], sub(marker_key, 1, -2), now_ms
    k = k + 1
    if lease.mode == SEQUENCED or lease.mode == DOCUMENT then
      lease.source_key = KEYS[k]
      k = k + 1
    end
    local done = 0
    if epoch then
      local held = read_held(lease, epoch, solo)
      if held.newer then
        done = held.newer
      else
        local record
        done, record = settle(action, lease, held, epoch, now_ms, err, refund, withdraw)
        if record then
          rows[#rows + 1] = encode_row({ token = lease.token, position = $RELEASE_POSITION, ts = now_ms, kind = ROW.new,
            key = shard .. lease.digest, fingerprint = record.fingerprint, attempt = record.attempt,
            epoch = record.epoch, counter = record.counter, first_seen = record.first_seen, winner = lease.token,
            error = err ~= '' and err or 'RELEASED', context = lease.context })
        end
      end
    end
    replies[#replies + 1] = done
  end
  add_rows(rows_key, table.concat(rows), most_rows)
end
return replies
