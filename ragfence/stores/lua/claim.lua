-- Claims, in groups of one shard each: decides, writes records and decision rows. core/decisions.py in Lua.
-- What most claims are, a first one or a replay of an operation without a sequence, is done here, by cutting and
-- joining bytes. Everything else goes through rules(), claim_rules.lua, whose functions are made only when needed.
--
-- KEYS   per group: marker, counter, rows; then per claim: record, and source unless the mode is KEYED
-- ARGV   [1] '1' if no object store stands behind this Redis, [2] number of groups, [3] most rows to keep, or '0'
--        per group: the shard as one byte, the keys' common prefix, encoded rows to write as they are,
--        the number of claims; then per claim one packed string (see redis_wire.pack_claim)
-- Returns, per claim, in order: {'N'} not ready | {'G', takeover, record, prior, source} | {'R', record}
--        | {'C', record} | {'I', until_ms, quarantined, record} | {'S', newest} | {'X', record of a newer format}

local solo, groups, most_rows = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local run, now_ms = run_id(), now()
local ts, none = struct.pack('>I6', now_ms), '\0\0\0\0\0\0'
local settle
local replies, k, a = {}, 1, 4
for _ = 1, groups do
  local marker_key, counter_key, rows_key = KEYS[k], KEYS[k + 1], KEYS[k + 2]
  local shard, prefix, count = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 3])
  local rows = { ARGV[a + 2] }
  k, a = k + 3, a + 4
  local epoch = usable_epoch(marker_key, run, solo, now_ms)
  local ahead = epoch and read_ahead(a, k, count)
  local counter  -- of a group read ahead: counted here, and written once
  for i = 1, count do
    local claim, record_key, source_key = ARGV[a], KEYS[k], nil
    local mode = byte(claim)
    a, k = a + 1, k + 1
    if mode ~= KEYED then
      source_key = KEYS[k]
      k = k + 1
    end
    local reply, row
    if not epoch then
      reply = { 'N' }
    elseif mode == KEYED then
      local data
      if ahead then data = ahead[i] else data = redis.call('GET', record_key) end
      local version, state
      if data then version, state = byte(data, 1, 2) end
      if not data or (version == 1 and (state == SEALED or state == FAILED) and
        sub(data, 3, 18) == sub(claim, 56, 71)) then
        local names_end = 117 + byte(claim, 116)
        names_end = names_end + byte(claim, names_end)
        local context = names_end + 5 + struct.unpack('>I4', claim, names_end + 1)
        if data then
          local effect = 64 + byte(data, 63)
          effect = effect + 1 + byte(data, effect)
          effect = effect + 1 + byte(data, effect)
          reply = { 'R', data }
          row = '\1' .. sub(claim, 3, 19) .. ts .. '\2\0' .. sub(claim, 20, 23) .. none .. shard .. sub(claim, 24, 55) ..
            sub(data, 3, 62) .. sub(data, effect, effect + byte(data, effect)) .. '\0' .. sub(claim, context)
        else
          local lease_ms, number = struct.unpack('>I6', claim, 96), nil
          if ahead then
            counter = (counter or tonumber(redis.call('GET', counter_key) or 0)) + 1
            number = counter
          else
            number = redis.call('INCR', counter_key)
          end
          data = '\1\1' .. sub(claim, 56, 71) .. sub(claim, 3, 18) ..
            struct.pack('>I8I6I2I6I6', epoch, number, 1, now_ms, now_ms + lease_ms) ..
            sub(claim, 116, names_end) .. '\0\0' .. sub(claim, names_end + 1, context - 1)
          put(record_key, data, struct.unpack('>I6', claim, 104))
          reply = { 'G', 0, data, '', '' }
          row = '\1' .. sub(claim, 3, 19) .. ts .. '\1\0' .. sub(claim, 20, 23) .. none .. shard .. sub(claim, 24, 55) ..
            sub(data, 3, 56) .. none .. '\0\0' .. sub(claim, context)
        end
      end
    end
    if not reply then
      settle = settle or rules()
      if counter then
        redis.call('SET', counter_key, counter)
        counter = nil
      end
      reply, row = settle(claim, record_key, source_key, epoch, solo, now_ms, counter_key, prefix, shard)
    end
    replies[#replies + 1] = reply
    rows[#rows + 1] = row
  end
  if counter then redis.call('SET', counter_key, counter) end
  add_rows(rows_key, table.concat(rows), most_rows)
end
return replies
