-- A replay or a first grant, as nearly all claims are: made by cutting and joining packed claims, records and rows.

-- A number that was cut off would let a stale owner in.
local function checked_number(number)
  if number > $MAX_COUNTER then error(string.format('fence number %.0f is out of range', number)) end
  return number
end

local function kind_of_claim(claim) return $short(claim, $claim.rest) end

-- Whether this record answers the claim: it ended, and has the claim's payload. Nothing answers the claim of a lock.
local function replays(data, claim)
  local version, flags = byte(data, $record.version:state)
  local state = $state(flags)
  return byte(claim) ~= $LOCK and version == $RECORD_VERSION and (state == $SEALED or state == $FAILED) and
    sub(data, $record.fingerprint) == sub(claim, $claim.fingerprint)
end

-- The row of a claim that this record answers. `ts`: the time, packed.
local function replay_row(data, claim, ts, shard)
  local effect_id, at, flags = '\0', $skip_short(data, $record.rest), byte(data, $record.state.at)
  if $has(flags, HAS_EFFECT_ID) then
    if $has(flags, HAS_OWNER) then at = $skip_short(data, at) end
    if $has(flags, HAS_ERROR) then at = $skip_short(data, at) end
    effect_id = $whole_short(data, at)
  end
  at = $skip_short(claim, $claim.rest)
  at = $skip_short(claim, at)
  at = $skip_long(claim, at)
  return $char(ROW_VERSION) .. sub(claim, $claim.token:position) .. ts .. $char(DUPLICATE, 0) .. sub(claim, $claim.waited) ..
    $zeros(row.expires) .. shard .. sub(claim, $claim.digest) .. sub(data, $record.fingerprint:when) .. effect_id ..
    '\0' .. sub(claim, at)
end

-- The record and the row of the first claim of a key, or of a lock that nobody holds.
local function first_grant(claim, epoch, number, now_ms, ts, shard)
  local owner = $skip_short(claim, $claim.rest)
  local payload = $skip_short(claim, owner)
  local context = $skip_long(claim, payload)
  local state, from, to = byte(claim) == $LOCK and $LOCKED or $HELD, owner, context - 1
  if payload > owner + 1 then state = state + $HAS_OWNER else from = payload end
  if context > payload + $LONG then state = state + $HAS_PAYLOAD else to = payload - 1 end
  local fence = $pack(record.epoch:attempt, epoch, number, 1) .. ts
  local data = $char(RECORD_VERSION) .. char(state) .. sub(claim, $claim.fingerprint) .. sub(claim, $claim.token) ..
    fence .. $pack(record.when, now_ms + $unpack(claim.lease, claim)) .. sub(claim, $claim.rest, owner - 1) ..
    sub(claim, from, to)
  return data, $char(ROW_VERSION) .. sub(claim, $claim.token:position) .. ts .. $char(NEW, 0) .. sub(claim, $claim.waited) ..
    $zeros(row.expires) .. shard .. sub(claim, $claim.digest:fingerprint) .. sub(claim, $claim.token) .. fence ..
    $zeros(row.sealed_at, 2) .. sub(claim, context)
end
