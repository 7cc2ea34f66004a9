-- What nearly all seals come to, the owner's own, by cutting and joining the bytes of redis_wire.pack_seal,
-- core/records.py and core/decision_rows.py.

-- Whether this is a record of format 1 that the seal's token holds.
local function owned(data, seal)
  local version, flags = byte(data, 1, 2)
  return version == 1 and flags % 16 == 1 and sub(data, 19, 30) == sub(seal, 3, 14)
end

-- What the owner's own seal is counted under.
local function seal_label(data, seal, lifetime)
  local flags = byte(seal, 2)
  local outcome = flags % 16 >= 8 and 'h' or (flags % 4 >= 2 and 'f' or 'n')
  return label(outcome, lifetime, sub(data, 58, 57 + byte(data, 57)), seal, 112)
end

-- The record after the seal of its owner, and the row. `ts`: the time in six bytes.
local function own_seal(data, seal, now_ms, ts, shard)
  local token, flags, held = sub(seal, 3, 14), byte(seal, 2), byte(data, 2)
  local failed, ttl, winner = flags % 4 >= 2, struct.unpack('>I6', seal, 83), sub(seal, 100, 111)
  local effect = 113 + byte(seal, 112)
  local result = effect + 1 + byte(seal, effect)
  local context = result + 4 + struct.unpack('>I4', seal, result)
  local kind_end = 57 + byte(data, 57)
  local state, error_code, effect_id, payload = failed and 5 or 4, '', '', ''
  if effect > 113 then state, error_code = state + 32, sub(seal, 112, effect - 1) end
  if result > effect + 1 then state, effect_id = state + 64, sub(seal, effect, result - 1) end
  if held >= 128 then
    local at = kind_end + 1
    if held % 32 >= 16 then at = at + 1 + byte(data, at) end
    if held % 64 >= 32 then at = at + 1 + byte(data, at) end
    if held % 128 >= 64 then at = at + 1 + byte(data, at) end
    state, payload = state + 128, sub(data, at, at + 3 + struct.unpack('>I4', data, at))
  end
  if winner == '\0\0\0\0\0\0\0\0\0\0\0\0' then winner = token end
  local fingerprint, seen = sub(data, 3, 18), sub(data, 43, 50)
  local after = '\1' .. char(state) .. fingerprint .. winner .. sub(data, 31, 42) .. seen .. ts ..
    sub(data, 57, kind_end) .. error_code .. effect_id .. payload .. sub(seal, result + 4, context - 1)
  return after, '\1' .. token .. '\250' .. ts .. (flags % 16 >= 8 and '\2' or '\1') .. sub(seal, 95, 99) ..
    (ttl > 0 and struct.pack('>I6', now_ms + ttl) or '\0\0\0\0\0\0') .. shard .. sub(seal, 15, 46) .. fingerprint ..
    winner .. sub(seal, 47, 58) .. seen .. ts .. sub(seal, effect, result - 1) ..
    (failed and sub(seal, 112, effect - 1) or '\0') .. sub(seal, context)
end
