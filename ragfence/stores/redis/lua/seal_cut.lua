-- The owner's own seal, as nearly all seals are: made by cutting and joining packed seals, records and rows.

-- Whether this is a record of this format whose lease has the seal's token.
local function owned(data, seal)
  local version, flags = byte(data, $record.version:state)
  return version == $RECORD_VERSION and $state(flags) == $HELD and sub(data, $record.token) == sub(seal, $seal.token)
end

-- The label under which the owner's seal is counted.
local function seal_label(data, seal, lifetime)
  local flags = byte(seal, $seal.flags.at)
  local outcome = $has(flags, SEAL_DUPLICATE) and 'h' or ($has(flags, SEAL_FAILED) and 'f' or 'n')
  return label(outcome, lifetime, $short(data, $record.rest), seal, $seal.rest)
end

-- The record after the seal of its owner, and the row. `ts`: the time, packed.
local function own_seal(data, seal, now_ms, ts, shard)
  local token, flags, held = sub(seal, $seal.token), byte(seal, $seal.flags.at), byte(data, $record.state.at)
  local failed, ttl, winner = $has(flags, SEAL_FAILED), $unpack(seal.ttl, seal), sub(seal, $seal.winner)
  local effect = $skip_short(seal, $seal.rest)
  local result = $skip_short(seal, effect)
  local context = $skip_long(seal, result)
  local kind_end = $skip_short(data, $record.rest)
  local state, error_code, effect_id, payload = failed and $FAILED or $SEALED, '', '', ''
  if effect > $seal.rest + 1 then state, error_code = state + $HAS_ERROR, sub(seal, $seal.rest, effect - 1) end
  if result > effect + 1 then state, effect_id = state + $HAS_EFFECT_ID, sub(seal, effect, result - 1) end
  if $has(held, HAS_PAYLOAD) then
    local at = kind_end
    if $has(held, HAS_OWNER) then at = $skip_short(data, at) end
    if $has(held, HAS_ERROR) then at = $skip_short(data, at) end
    if $has(held, HAS_EFFECT_ID) then at = $skip_short(data, at) end
    state, payload = state + $HAS_PAYLOAD, sub(data, at, $skip_long(data, at) - 1)
  end
  if winner == $zeros(seal.winner) then winner = token end
  local fingerprint, seen = sub(data, $record.fingerprint), sub(data, $record.attempt:first_seen)
  local after = $char(RECORD_VERSION) .. char(state) .. fingerprint .. winner .. sub(data, $record.epoch:counter) .. seen ..
    ts .. sub(data, $record.rest, kind_end - 1) .. error_code .. effect_id .. payload ..
    sub(seal, result + $LONG, context - 1)
  return after, $char(ROW_VERSION) .. token .. $char(SEAL_POSITION) .. ts ..
    ($has(flags, SEAL_DUPLICATE) and $char(DUPLICATE) or $char(NEW)) .. sub(seal, $seal.row_flags:waited) ..
    (ttl > 0 and $pack(row.expires, now_ms + ttl) or $zeros(row.expires)) .. shard .. sub(seal, $seal.digest) ..
    fingerprint .. winner .. sub(seal, $seal.epoch:counter) .. seen .. ts .. sub(seal, effect, result - 1) ..
    (failed and sub(seal, $seal.rest, effect - 1) or '\0') .. sub(seal, context)
end
