-- Seals: compares the token, then acts, as apply_seal of core/decisions.py does. Sealed is terminal.
-- seal_cut.lua handles the owner's seal of an operation without a sequence, or of a document without a head. A single one
-- of an operation is answered in seal_alone.lua. Everything else goes through rules(), which is seal_rules.lua.
--
-- KEYS   per group: marker, rows, count of head moves; then per seal: record, and source unless the mode is KEYED or LOCK
-- ARGV   [1] '1' if there is no object store, [2] number of groups, [3] most rows to keep, or '0',
--        [4] '', or, for a single seal without a sequence, the run_id that was read when the connection was opened
--        per group: the shard as one byte, the common prefix of its keys, the number of seals; then per seal one packed
--        string (see pack_seal in codec.py)
-- Returns one string per seal, in order (not in a list if ARGV[4] is given). Its first byte says what follows:
--        S record, sealed | F the stored record, or nothing: fenced out | N not ready
--        | X record of a newer format

local solo, groups, most_rows = ARGV[1] == '1', tonumber(ARGV[2]), ARGV[3]
local run, now_ms = run_id(), now()
local ts = $pack(record.when, now_ms)
local settle
local replies, k, a = {}, 1, 5
for _ = 1, groups do
  local marker_key, rows_key, moves_key, moves = KEYS[k], KEYS[k + 1], KEYS[k + 2], 0
  local shard, prefix, count = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 2])
  k, a = k + 3, a + 3
  local rows, answers, sources, documents = {}, {}, {}, 0
  local epoch = usable_epoch(marker_key, run, solo, now_ms)
  local epoch_bytes = epoch and $pack(seal.epoch, epoch)
  local ahead = epoch and read_ahead(a, k, count)
  local first_lease = epoch and not solo and $char(RECORD_VERSION, SOURCE_LEASE) .. $pack(source.stamp, epoch)
  for i = 1, count do
    local seal, record_key, source_key = ARGV[a], KEYS[k], nil
    local mode, flags = byte(seal, $seal.mode:flags)
    a, k = a + 1, k + 1
    if mode == SEQUENCED or mode == DOCUMENT then
      source_key = KEYS[k]
      k = k + 1
    end
    local reply, row, what, change
    if not epoch then
      reply = 'N'
    elseif mode ~= SEQUENCED and mode ~= LOCK and sub(seal, $seal.epoch) == epoch_bytes then
      local data
      if mode == DOCUMENT then
        local source = ahead and ahead[2 * i]
        if source and sub(source, $source.version:stamp) == first_lease and
          sub(source, $leased.digest) == sub(seal, $seal.digest) then
          data = sub(source, $leased.rest)
        end
      elseif ahead then
        data = ahead[i]
      else
        data = redis.call('GET', record_key)
      end
      if data and owned(data, seal) then
        data, row = own_seal(data, seal, now_ms, ts, shard)
        if source_key then
          local live, ordered = $has(flags, SEAL_LIVE), $has(flags, SEAL_SEQUENCE)
          local head = $SOURCE_HEAD + (live and $SOURCE_LIVE or 0) + (ordered and $SOURCE_SEQUENCE or 0)
          put(source_key, $char(RECORD_VERSION) .. char(head) .. sub(first_lease, $source.stamp) .. sub(seal, $seal.digest) ..
            sub(seal, $seal.sequence:metadata_hash) .. $pack(head.size, #data) .. data, $unpack(seal.source_ttl, seal))
          sources[#sources + 1] = sub(source_key, #prefix + 2)
          what, change = seal_label(data, seal, '-'), live and 1 or 0
          if ahead[2 * i - 1] then redis.call('DEL', record_key) end
        else
          local ttl_ms = $unpack(seal.ttl, seal)
          put(record_key, data, ttl_ms)
          redis.call('ZREM', prefix .. 'p', sub(seal, $seal.digest))
          what = seal_label(data, seal, ttl_ms)
        end
        reply = 'S' .. data
      end
    end
    if not reply then
      settle = settle or rules()
      reply, row, what, change = settle(seal, record_key, source_key, epoch, solo, now_ms, prefix, shard)
    end
    if what then answers[what] = (answers[what] or 0) + 1 end
    documents = documents + (change or 0)
    if mode == DOCUMENT and byte(reply) == $code(S) then moves = moves + 1 end
    replies[#replies + 1] = reply
    rows[#rows + 1] = row
  end
  if moves > 0 then
    redis.call('INCRBY', moves_key, moves)
    redis.call('HINCRBY', prefix .. 'c', 'm', moves)
    if documents ~= 0 then redis.call('HINCRBY', prefix .. 'c', 'd', documents) end
  end
  if #sources > 0 then redis.call('ZREM', prefix .. 'q', unpack(sources)) end
  for what, n in pairs(answers) do tally(prefix, now_ms, what, n) end
  add_rows(rows_key, table.concat(rows), most_rows)
end
if ARGV[4] ~= '' then return replies[1] end
return replies
