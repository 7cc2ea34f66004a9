-- Seals: compares the token, then acts; sealed is terminal. `settle_seal` of core/decisions.py in Lua.
-- The owner's own seal of an operation without a sequence is done here, by cutting and joining bytes; everything else
-- goes through rules(), seal_rules.lua.
--
-- KEYS   per group: marker, rows; then per seal: record, and source unless the mode is KEYED
-- ARGV   [1] '1' if no object store stands behind this Redis, [2] number of groups, [3] most rows to keep, or '0'
--        per group: the shard as one byte, the keys' common prefix, the number of seals; then per seal one packed
--        string (see redis_wire.pack_seal)
-- Returns, per seal, in order: {'S', record} sealed | {'F', what stands there instead or ''} fenced out
--        | {'N'} not ready | {'X', record of a newer format}

local solo, groups, most_rows = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local run, now_ms = run_id(), now()
local ts, none = struct.pack('>I6', now_ms), '\0\0\0\0\0\0'
local nobody = string.rep('\0', 16)
local settle
local replies, k, a = {}, 1, 4
for _ = 1, groups do
  local marker_key, rows_key = KEYS[k], KEYS[k + 1]
  local shard, prefix, count = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2])
  k, a = k + 2, a + 3
  local rows = {}
  local epoch = usable_epoch(marker_key, run, solo, now_ms)
  local epoch_bytes = epoch and struct.pack('>I8', epoch)
  local ahead = epoch and read_ahead(a, k, count)
  for i = 1, count do
    local seal, record_key, source_key = ARGV[a], KEYS[k], nil
    local mode, flags = byte(seal, 1, 2)
    a, k = a + 1, k + 1
    if mode ~= KEYED then
      source_key = KEYS[k]
      k = k + 1
    end
    local reply, row
    if not epoch then
      reply = { 'N' }
    elseif mode == KEYED and sub(seal, 51, 58) == epoch_bytes then
      local data
      if ahead then data = ahead[i] else data = redis.call('GET', record_key) end
      local version, state
      if data then version, state = byte(data, 1, 2) end
      if version == 1 and state == HELD and sub(data, 19, 34) == sub(seal, 3, 18) then
        local failed, duplicate = flags % 4 >= 2, flags % 16 >= 8
        local ttl, winner = struct.unpack('>I6', seal, 89), sub(seal, 106, 121)
        local effect = 123 + byte(seal, 122)
        local result = effect + 1 + byte(seal, effect)
        local context = result + 4 + struct.unpack('>I4', seal, result)
        local kind_end = 63 + byte(data, 63)
        local payload = kind_end + 1
        for _ = 1, 3 do payload = payload + 1 + byte(data, payload) end
        local payload_end = payload + 3 + struct.unpack('>I4', data, payload)
        data = (failed and '\1\5' or '\1\4') .. sub(data, 3, 18) ..
          (winner == nobody and sub(seal, 3, 18) or winner) .. sub(data, 35, 56) .. ts .. sub(data, 63, kind_end) ..
          '\0' .. sub(seal, 122, result - 1) .. sub(data, payload, payload_end) .. sub(seal, result + 4, context - 1)
        put(record_key, data, ttl)
        reply = { 'S', data }
        row = '\1' .. sub(seal, 3, 18) .. '\250' .. ts .. (duplicate and '\2' or '\1') .. sub(seal, 101, 105) ..
          (ttl > 0 and struct.pack('>I6', now_ms + ttl) or none) .. shard .. sub(seal, 19, 50) .. sub(data, 3, 34) ..
          sub(seal, 51, 64) .. sub(data, 49, 62) ..
          sub(seal, effect, result - 1) .. (failed and sub(seal, 122, effect - 1) or '\0') .. sub(seal, context)
      end
    end
    if not reply then
      settle = settle or rules()
      reply, row = settle(seal, record_key, source_key, epoch, solo, now_ms, prefix, shard)
    end
    replies[#replies + 1] = reply
    rows[#rows + 1] = row
  end
  add_rows(rows_key, table.concat(rows), most_rows)
end
return replies
