-- The seals that seal.lua does not handle by itself: `apply_seal` of core/decisions.py in Lua.

local function unpack_seal(data)
  local s = {}
  local at
  s.mode, s.flags, s.token, s.digest, s.epoch, s.counter, s.sequence, s.metadata_hash, s.ttl, s.source_ttl,
    s.row_flags, s.waited, s.winner, at = $unpack(seal, data)
  if not $has(s.flags, SEAL_SEQUENCE) then s.sequence = nil end
  s.failed = $has(s.flags, SEAL_FAILED)
  s.live = $has(s.flags, SEAL_LIVE)
  s.duplicate = $has(s.flags, SEAL_DUPLICATE)
  s.error, at = read_short(data, at)
  s.effect_id, at = read_short(data, at)
  s.result, at = read_long(data, at)
  s.context, at = read_long(data, at)
  return s
end

local function standing(held, seal)
  local head = held.source and held.source.head
  if head and head.digest == seal.digest and head.record then return head.record end
  return held.record
end

local function holds(record, token) return record.state == HELD and record.token == token end

local function end_record(record, seal, now_ms)
  return copy_record(record, { state = seal.failed and FAILED or SEALED, when = now_ms, owner = '',
    token = seal.winner == NOBODY and record.token or seal.winner,
    error = seal.error, effect_id = seal.effect_id, result = seal.result })
end

local function settle_keyed(record, seal, now_ms, prefix)
  if not record then return 'F', nil end
  if ended(record) then return record.token == seal.token and 'S' or 'F', record end
  if not holds(record, seal.token) then return 'F', record end
  local after = end_record(record, seal, now_ms)
  put(seal.record_key, after.raw, seal.ttl)
  redis.call('ZREM', prefix .. 'p', seal.digest)
  return 'S', after, seal.ttl
end

-- Returns the code, the record, the lifetime to count if anything changed ('-': it leaves no key of its own), and the
-- change of the number of live documents.
local function settle(seal, held, epoch, now_ms, prefix)
  if seal.epoch ~= epoch or seal.mode == LOCK then return 'F', standing(held, seal) end
  if seal.mode == KEYED then return settle_keyed(held.record, seal, now_ms, prefix) end
  local lease = held.source and held.source.lease
  if not (lease and lease.digest == seal.digest and holds(lease.record, seal.token)) then
    local there = standing(held, seal)
    if ended(there) and there.token == seal.token then return 'S', there end
    return 'F', there
  end
  local record, head = end_record(lease.record, seal, now_ms), held.source.head
  local sequence = seal.sequence or (head and head.sequence)
  local function leave_queue() redis.call('ZREM', prefix .. 'q', sub(seal.source_key, #prefix + 2)) end
  -- The first write needs memory, so that a server without any refuses it before anything has changed.
  if seal.mode == SEQUENCED then
    local kept = ended(held.record) and held.record or nil
    if not kept then put(seal.record_key, record.raw, seal.ttl) end
    local moved = { digest = seal.digest, live = true, sequence = sequence, metadata_hash = NO_METADATA }
    put(seal.source_key, encode_source({ stamp = epoch, head = moved }), seal.source_ttl)
    if not kept then redis.call('ZREM', prefix .. 'p', seal.digest) end
    leave_queue()
    return 'S', kept or record, kept and '-' or seal.ttl
  end
  if head and head.live and head.digest ~= seal.digest and head.record then
    put(prefix .. 'k' .. head.digest, $pack(parked.stamp, epoch) .. head.record.raw, 0)
  end
  local moved = { digest = seal.digest, live = seal.live, sequence = sequence,
    metadata_hash = seal.metadata_hash, record = record }
  put(seal.source_key, encode_source({ stamp = epoch, head = moved }), seal.source_ttl)
  if held.stored then redis.call('DEL', seal.record_key) end
  leave_queue()
  return 'S', record, '-', (seal.live and 1 or 0) - (head and head.live and 1 or 0)
end

-- As performed_twice of core/decision_rows.py: otherwise the sender of the seal writes the row.
local function performed_twice(seal, r, solo)
  local own = seal.winner == NOBODY and seal.token or seal.winner
  return r.token ~= own and (solo or ended(r))
end

local function seal_row(seal, code, r, now_ms, shard, solo)
  if not r then return '' end
  local fenced = code == 'F'
  if fenced and not performed_twice(seal, r, solo) then return '' end
  local flags = seal.row_flags
  if fenced and not $has(flags, FENCED_OUT) then flags = flags + $FENCED_OUT end
  return encode_row({ token = seal.token, position = fenced and $FENCED_POSITION or $SEAL_POSITION, ts = now_ms,
    kind = (seal.duplicate or fenced) and ROW.duplicate or ROW.new, key = shard .. seal.digest,
    fingerprint = r.fingerprint, flags = flags, attempt = r.attempt,
    epoch = fenced and r.epoch or seal.epoch, counter = fenced and r.counter or seal.counter,
    first_seen = r.first_seen, sealed_at = ended(r) and r.when or 0,
    expires = (not fenced and seal.ttl > 0) and now_ms + seal.ttl or 0, waited = seal.waited, winner = r.token,
    effect_id = r.effect_id, error = fenced and 'LEASE.fenced_out' or (seal.failed and r.error or ''),
    context = seal.context })
end

local function settled(packed, record_key, source_key, epoch, solo, now_ms, prefix, shard)
  local seal = unpack_seal(packed)
  seal.record_key, seal.source_key = record_key, source_key
  local held = read_held(seal, epoch, solo)
  if held.newer then return 'X' .. held.newer, '' end
  local code, record, lifetime, change = settle(seal, held, epoch, now_ms, prefix)
  local row, what = seal_row(seal, code, record, now_ms, shard, solo), nil
  if code == 'F' then
    what = row ~= '' and label('o', 0, record.kind, packed, $seal.rest) or nil
  elseif lifetime then
    what = seal_label(record.raw, packed, lifetime)
  end
  return code .. (record and record.raw or ''), row, what, change
end

return settled
