-- The claims that claim.lua does not answer by itself: `apply_claim` of core/decisions.py in Lua.

local function unpack_claim(data)
  local c = {}
  local at
  c.mode, c.flags, c.token, c.position, c.waited, c.digest, c.fingerprint, c.sequence, c.metadata_hash, c.lease_ms,
    c.max_attempts, c.pending_ttl, c.source_ttl, at = $unpack(claim, data)
  if not $has(c.flags, CLAIM_SEQUENCE) then c.sequence = nil end
  c.retract = $has(c.flags, CLAIM_RETRACT)
  c.row_on_conflict = $has(c.flags, CLAIM_ROW_ON_CONFLICT)
  c.kind, at = read_short(data, at)
  c.owner, at = read_short(data, at)
  c.payload, at = read_long(data, at)
  c.context, at = read_long(data, at)
  return c
end

local function raises(sequence, head)
  if not sequence then return false end
  return not head or not head.sequence or compare_sequences(sequence, head.sequence) > 0
end

local function held_at(r, now_ms) return (r.state == HELD or r.state == LOCKED) and now_ms < r.when end

local function next_attempt(before, claim, takeover, prior)
  if before.state == QUARANTINED then return { code = 'I', record = before, quarantined = true } end
  if before.attempt >= claim.max_attempts then
    return { code = 'Q', record = copy_record(before, { state = QUARANTINED }), unsettled = takeover }
  end
  return { code = 'G', attempt = before.attempt + 1, first_seen = before.first_seen, takeover = takeover,
    prior = prior, error = before.error }
end

local function decide_lock(known, claim, now_ms)
  if not known then return { code = 'G', attempt = 1, first_seen = now_ms, error = '' } end
  if known.state ~= LOCKED then return { code = 'C', record = known } end
  if known.token == claim.token then return { code = 'G', again = known } end
  if held_at(known, now_ms) then return { code = 'I', record = known } end
  return { code = 'G', attempt = 1, first_seen = now_ms, takeover = true, error = '' }
end

local function decide_keyed(known, claim, now_ms)
  if not known then return { code = 'G', attempt = 1, first_seen = now_ms, error = '' } end
  if ended(known) then return { code = 'R', record = known } end
  if known.state == HELD and known.token == claim.token then return { code = 'G', again = known } end
  if held_at(known, now_ms) then return { code = 'I', record = known } end
  return next_attempt(known, claim, known.state == HELD, nil)
end

local function decide_sequenced(head, lease, known, claim, now_ms)
  local sealed = ended(known) and known or nil
  if sealed and not raises(claim.sequence, head) then return { code = 'R', record = sealed } end
  local takeover = lease ~= nil and lease.record.state == HELD
  if takeover then
    if lease.record.token == claim.token then return { code = 'G', again = lease.record, prior = sealed } end
    if held_at(lease.record, now_ms) then return { code = 'I', record = lease.record } end
  end
  local mine = known
  if lease and lease.digest == claim.digest then mine = lease.record end
  if not mine or ended(mine) then
    return { code = 'G', attempt = 1, first_seen = now_ms, takeover = takeover, prior = sealed, error = '' }
  end
  return next_attempt(mine, claim, takeover, sealed)
end

local function decide_document(head, lease, parked, claim, now_ms)
  local prior = parked
  if head and head.digest == claim.digest then prior = head.record end
  if lease and lease.record.state == HELD then
    if lease.record.token == claim.token then return { code = 'G', again = lease.record, prior = prior } end
    if held_at(lease.record, now_ms) then return { code = 'I', record = lease.record } end
  end
  local unsettled = lease ~= nil and (lease.record.state == HELD or lease.unsettled)
  local same = claim.retract
  if head then same = head.digest == claim.digest end
  if same and not unsettled and not raises(claim.sequence, head) then
    if not head then return { code = 'R' } end
    if head.metadata_hash == claim.metadata_hash then return { code = 'R', record = head.record } end
  end
  if lease and lease.digest == claim.digest then return next_attempt(lease.record, claim, unsettled, prior) end
  return { code = 'G', attempt = 1, first_seen = now_ms, takeover = unsettled, prior = prior, error = '' }
end

local function decide(held, claim, now_ms)
  if claim.mode == LOCK then return decide_lock(held.record, claim, now_ms) end
  local head = held.source and held.source.head
  local lease = held.source and held.source.lease
  if claim.sequence and head and head.sequence and compare_sequences(claim.sequence, head.sequence) < 0 then
    return { code = 'S', newest = head.sequence }
  end
  local known = held.record
  if head and head.digest == claim.digest and head.record then
    known = head.record
  elseif lease and lease.digest == claim.digest and not ended(held.record) then
    known = lease.record
  end
  if known and (known.state == LOCKED or known.fingerprint ~= claim.fingerprint) then
    return { code = 'C', record = known }
  end
  if lease and lease.digest == claim.digest and lease.record.fingerprint ~= claim.fingerprint then
    return { code = 'C', record = lease.record }
  end
  if head and claim.sequence and head.sequence and head.digest ~= claim.digest and
    compare_sequences(claim.sequence, head.sequence) == 0 then
    return { code = 'C' }
  end
  if claim.mode == KEYED then return decide_keyed(known, claim, now_ms) end
  if claim.mode == SEQUENCED then return decide_sequenced(head, lease, known, claim, now_ms) end
  return decide_document(head, lease, held.record, claim, now_ms)
end

-- Stores a pending record where it belongs: under its key, or as the one lease of its source.
local function place(claim, held, record, unsettled, epoch, prefix, now_ms)
  if claim.mode == KEYED or claim.mode == LOCK then
    put(claim.record_key, record.raw, claim.pending_ttl)
    redis.call('ZADD', prefix .. 'p', score(now_ms, claim.pending_ttl), claim.digest)
    return ''
  end
  local before = held.source and held.source.lease
  if claim.mode == SEQUENCED then
    if held.record and not ended(held.record) then
      redis.call('DEL', claim.record_key)
      redis.call('ZREM', prefix .. 'p', claim.digest)
    end
    if before and before.digest ~= claim.digest then
      local aside_key = prefix .. 'k' .. before.digest
      if redis.call('EXISTS', aside_key) == 0 then
        put(aside_key, before.record.raw, claim.pending_ttl)
        redis.call('ZADD', prefix .. 'p', score(now_ms, claim.pending_ttl), before.digest)
      end
    end
  end
  local source = { stamp = epoch, head = held.source and held.source.head,
    lease = { digest = claim.digest, record = record, unsettled = unsettled } }
  local raw = encode_source(source)
  put(claim.source_key, raw, claim.source_ttl)
  redis.call('ZADD', prefix .. 'q', score(now_ms, claim.source_ttl), sub(claim.source_key, #prefix + 2))
  return raw
end

local function claim_row(claim, answer, now_ms, shard)
  local r = answer.record
  local row = { token = claim.token, position = claim.position, ts = now_ms, key = shard .. claim.digest,
    fingerprint = claim.fingerprint, waited = claim.waited, context = claim.context }
  if answer.code == 'G' then
    row.kind, row.flags = ROW.new, answer.takeover and $TAKEOVER or 0
  elseif answer.code == 'R' then
    row.kind = ROW.duplicate
  elseif answer.code == 'C' then
    if not claim.row_on_conflict then return '' end
    row.kind = ROW.conflict
  elseif answer.code == 'I' then
    row.kind, row.error = ROW.in_flight, answer.quarantined and 'QUARANTINED' or ''
  else
    row.kind = ROW.stale
  end
  if r then
    row.attempt, row.epoch, row.counter, row.first_seen = r.attempt, r.epoch, r.counter, r.first_seen
    if ended(r) then
      row.sealed_at, row.effect_id = answer.code ~= 'G' and r.when or 0, r.effect_id
    end
    if answer.code ~= 'C' then row.winner = r.token end
  end
  return encode_row(row)
end

-- The letter under which an answer is counted; a grant is not an answer.
local OUTCOME = { R = 'd', C = 'c', I = 'i', S = 's' }

local function settle(packed, record_key, source_key, epoch, solo, now_ms, counter_key, prefix, shard)
  local claim = unpack_claim(packed)
  claim.record_key, claim.source_key = record_key, source_key
  local held = read_held(claim, epoch, solo)
  if held.newer then return 'X' .. held.newer, '' end
  local answer = decide(held, claim, now_ms)
  if answer.code == 'Q' then
    place(claim, held, answer.record, answer.unsettled, epoch, prefix, now_ms)
    answer = { code = 'I', record = answer.record, quarantined = true }
  elseif answer.code == 'G' then
    if answer.again then
      answer.record, answer.source = answer.again, held.source and held.source.raw or ''
    else
      answer.record = { state = claim.mode == LOCK and LOCKED or HELD, fingerprint = claim.fingerprint, token = claim.token, epoch = epoch,
        counter = checked_number(redis.call('INCR', counter_key)), attempt = answer.attempt,
        first_seen = answer.first_seen, when = now_ms + claim.lease_ms, kind = claim.kind, owner = claim.owner, error = answer.error,
        effect_id = '', payload = claim.payload, result = '' }
      encode_record(answer.record)
      -- Only a seal settles a document. Taking it over and releasing it leaves it as unsettled as it was.
      local unsettled = answer.takeover and claim.mode == DOCUMENT
      answer.source = place(claim, held, answer.record, unsettled, epoch, prefix, now_ms)
    end
  end
  local row = claim_row(claim, answer, now_ms, shard)
  local outcome = row ~= '' and OUTCOME[answer.code] or nil
  if answer.quarantined then outcome = 'q' end
  local raw = answer.record and answer.record.raw or ''
  if answer.code == 'G' then
    local takeover, prior = answer.takeover and '\1' or '\0', answer.prior and answer.prior.raw or ''
    if prior == '' and answer.source == '' then return 'G' .. takeover .. raw, row end
    return 'P' .. takeover .. long(raw) .. long(prior) .. answer.source, row
  elseif answer.code == 'I' then
    return (answer.quarantined and 'I\1' or 'I\0') .. raw, row, outcome
  elseif answer.code == 'S' then
    return 'S' .. answer.newest, row, outcome
  end
  return answer.code .. raw, row, outcome
end

return settle
