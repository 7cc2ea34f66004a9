-- Seals: compares the token, then acts; sealed is terminal. `settle_seal` of core/decisions.py in Lua.
-- The owner's own seal of an operation without a sequence, or of a document that has no head yet, is done here, by
-- cutting and joining bytes; everything else goes through rules(), seal_rules.lua.
--
-- KEYS   per group: marker, rows, count of head moves; then per seal: record, and source unless the mode is KEYED
-- ARGV   [1] '1' if no object store stands behind this Redis, [2] number of groups, [3] most rows to keep, or '0',
--        [4] the run_id that was read when the connection was opened, or '': for a single seal without a sequence, which
--        may stand on any server that has its lease
--        per group: the shard as one byte, the keys' common prefix, the number of seals; then per seal one packed
--        string (see redis_wire.pack_seal)
-- Returns, per seal, in order: {'S', record} sealed | {'F', what stands there instead or ''} fenced out
--        | {'N'} not ready | {'X', record of a newer format}

local solo, groups, most_rows = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local run, now_ms = ARGV[4], now()
if run == '' or sub(redis.call('GET', KEYS[1]) or '', -40) ~= run then run = run_id() end
local ts, none = struct.pack('>I6', now_ms), '\0\0\0\0\0\0'
local nobody = string.rep('\0', 12)
local settle
local replies, k, a = {}, 1, 5
for _ = 1, groups do
  local marker_key, rows_key, moves_key, moves = KEYS[k], KEYS[k + 1], KEYS[k + 2], 0
  local shard, prefix, count = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2])
  k, a = k + 3, a + 3
  local rows = {}
  local epoch = usable_epoch(marker_key, run, solo, now_ms)
  local epoch_bytes = epoch and struct.pack('>I7', epoch)
  local ahead = epoch and read_ahead(a, k, count)
  local first_lease = epoch and not solo and '\1\2' .. struct.pack('>I8', epoch)
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
    elseif mode ~= SEQUENCED and sub(seal, 47, 53) == epoch_bytes then
      local data
      if mode == DOCUMENT then
        local source = ahead and ahead[2 * i]
        if source and sub(source, 1, 10) == first_lease and sub(source, 11, 42) == sub(seal, 15, 46) then
          data = sub(source, 47)
        end
      elseif ahead then
        data = ahead[i]
      else
        data = redis.call('GET', record_key)
      end
      local version, held
      if data then version, held = byte(data, 1, 2) end
      if version == 1 and held % 16 == HELD and sub(data, 19, 30) == sub(seal, 3, 14) then
        local failed, duplicate = flags % 4 >= 2, flags % 16 >= 8
        local ttl, winner = struct.unpack('>I6', seal, 83), sub(seal, 100, 111)
        local effect = 113 + byte(seal, 112)
        local result = effect + 1 + byte(seal, effect)
        local context = result + 4 + struct.unpack('>I4', seal, result)
        local kind_end = 57 + byte(data, 57)
        local state, error_code, effect_id, payload = failed and FAILED or SEALED, '', '', ''
        if effect > 113 then state, error_code = state + 32, sub(seal, 112, effect - 1) end
        if result > effect + 1 then state, effect_id = state + 64, sub(seal, effect, result - 1) end
        if held >= 128 then
          local at = kind_end + 1
          if held % 32 >= 16 then at = at + 1 + byte(data, at) end
          if held % 64 >= 32 then at = at + 1 + byte(data, at) end
          if held % 128 >= 64 then at = at + 1 + byte(data, at) end
          state, payload = state + 128, sub(data, at, at + 3 + struct.unpack('>I4', data, at))
        end
        data = '\1' .. char(state) .. sub(data, 3, 18) .. (winner == nobody and sub(seal, 3, 14) or winner) ..
          sub(data, 31, 50) .. ts .. sub(data, 57, kind_end) .. error_code .. effect_id .. payload ..
          sub(seal, result + 4, context - 1)
        if source_key then
          local head = 1 + (flags % 8 >= 4 and 4 or 0) + (flags % 2 >= 1 and 8 or 0)
          put(source_key, '\1' .. char(head) .. sub(first_lease, 3) .. sub(seal, 15, 46) .. sub(seal, 59, 82) ..
            struct.pack('>I4', #data) .. data, struct.unpack('>I6', seal, 89))
          if ahead[2 * i - 1] then redis.call('DEL', record_key) end
        else
          put(record_key, data, ttl)
        end
        reply = { 'S', data }
        row = '\1' .. sub(seal, 3, 14) .. '\250' .. ts .. (duplicate and '\2' or '\1') .. sub(seal, 95, 99) ..
          (ttl > 0 and struct.pack('>I6', now_ms + ttl) or none) .. shard .. sub(seal, 15, 46) .. sub(data, 3, 30) ..
          sub(seal, 47, 58) .. sub(data, 43, 56) ..
          sub(seal, effect, result - 1) .. (failed and sub(seal, 112, effect - 1) or '\0') .. sub(seal, context)
      end
    end
    if not reply then
      settle = settle or rules()
      reply, row = settle(seal, record_key, source_key, epoch, solo, now_ms, prefix, shard)
    end
    if mode == DOCUMENT and reply[1] == 'S' then moves = moves + 1 end
    replies[#replies + 1] = reply
    rows[#rows + 1] = row
  end
  if moves > 0 then redis.call('INCRBY', moves_key, moves) end
  add_rows(rows_key, table.concat(rows), most_rows)
end
return replies
