-- What nearly all claims come to, a replay or a first grant, by cutting and joining the bytes of redis_wire.pack_claim,
-- core/records.py and core/decision_rows.py.

-- Records hold the number of a claim in five bytes.
local function checked_number(number)
  if number >= 2^40 then error(string.format('fence number %.0f is out of range', number)) end
  return number
end

local function kind_of_claim(claim) return sub(claim, 113, 112 + byte(claim, 112)) end

-- Whether this is an ended record of the claim's own payload: it answers.
local function replays(data, claim)
  local version, flags = byte(data, 1, 2)
  local state = flags % 16
  return version == 1 and (state == 4 or state == 5) and sub(data, 3, 18) == sub(claim, 52, 67)
end

-- The row of a claim that was answered with this record. `ts`: the time in six bytes.
local function replay_row(data, claim, ts, shard)
  local effect_id, at, flags = '\0', 58 + byte(data, 57), byte(data, 2)
  if flags % 128 >= 64 then
    if flags % 32 >= 16 then at = at + 1 + byte(data, at) end
    if flags % 64 >= 32 then at = at + 1 + byte(data, at) end
    effect_id = sub(data, at, at + byte(data, at))
  end
  at = 113 + byte(claim, 112)
  at = at + 1 + byte(claim, at)
  at = at + 4 + struct.unpack('>I4', claim, at)
  return '\1' .. sub(claim, 3, 15) .. ts .. '\2\0' .. sub(claim, 16, 19) .. '\0\0\0\0\0\0' .. shard ..
    sub(claim, 20, 51) .. sub(data, 3, 56) .. effect_id .. '\0' .. sub(claim, at)
end

-- The record and the row of the first claim of a key.
local function first_grant(claim, epoch, number, now_ms, ts, shard)
  local owner = 113 + byte(claim, 112)
  local payload = owner + 1 + byte(claim, owner)
  local context = payload + 4 + struct.unpack('>I4', claim, payload)
  local state, from, to = 1, owner, context - 1
  if payload > owner + 1 then state = state + 16 else from = payload end
  if context > payload + 4 then state = state + 128 else to = payload - 1 end
  local fence = struct.pack('>I7I5I2', epoch, number, 1) .. ts
  local data = '\1' .. char(state) .. sub(claim, 52, 67) .. sub(claim, 3, 14) .. fence ..
    struct.pack('>I6', now_ms + struct.unpack('>I6', claim, 92)) .. sub(claim, 112, owner - 1) .. sub(claim, from, to)
  return data, '\1' .. sub(claim, 3, 15) .. ts .. '\1\0' .. sub(claim, 16, 19) .. '\0\0\0\0\0\0' .. shard ..
    sub(claim, 20, 67) .. sub(claim, 3, 14) .. fence .. '\0\0\0\0\0\0\0\0' .. sub(claim, context)
end
