-- Claims, in groups of one shard each: decides, then writes records and decision rows, as core/decisions.py does.
-- claim_cut.lua handles most claims: first ones, and replays of an operation without a sequence. A single one of those
-- is answered in claim_alone.lua and does not get here. Everything else goes through rules(), which is claim_rules.lua
-- and whose functions are created only when they are needed.
--
-- KEYS   per group: marker, counter, rows; then per claim: record, and source unless the mode is KEYED or LOCK
-- ARGV   [1] '1' if there is no object store, [2] number of groups, [3] most rows to keep, or '0',
--        [4] '', or, for a single claim without a sequence, the run_id that was read when the connection was opened
--        per group: the shard as one byte, the common prefix of its keys, rows that are encoded already, their counts
--        (see pack_answers in codec.py), the number of claims; then per claim one packed string (see pack_claim)
-- Returns one string per claim, in order (not in a list if ARGV[4] is given). Its first byte says what follows:
--        N not ready | R record or nothing | C record or nothing | I quarantined:1 record | S newest:8
--        | G takeover:1 record | P takeover:1 record (length:4) prior (length:4) source | X record of a newer format

local solo, groups, most_rows = ARGV[1] == '1', tonumber(ARGV[2]), ARGV[3]
local run, now_ms = run_id(), now()
local ts = $pack(record.when, now_ms)
local settle

local replies, k, a = {}, 1, 5
for _ = 1, groups do
  local marker_key, counter_key, rows_key = KEYS[k], KEYS[k + 1], KEYS[k + 2]
  local shard, prefix, count = ARGV[a], ARGV[a + 1], tonumber(ARGV[a + 4])
  local rows, answers = { ARGV[a + 2] }, {}
  local at, told = 1, ARGV[a + 3]
  while at < #told do
    local n, what
    n, what, at = struct.unpack('$ANSWER_FORMAT', told, at)
    answers[what] = n
  end
  k, a = k + 3, a + 5
  local epoch = usable_epoch(marker_key, run, solo, now_ms)
  local ahead = epoch and count > 0 and read_ahead(a, k, count)
  local pending = {}  -- of a group read ahead, whose sources all differ: added in one call
  local counter  -- of a group read ahead: raised once, before the first of its numbers is used
  if ahead then
    local grants, documents = 0, byte(ARGV[a]) == DOCUMENT
    for i = 1, count do
      local claim, first = ARGV[a + i - 1], not ahead[i]
      if documents then first = not ahead[2 * i - 1] and not ahead[2 * i] and not $has(byte(claim, $claim.flags.at), CLAIM_RETRACT) end
      if first then
        grants = grants + 1
      elseif documents or not replays(ahead[i], claim) then
        ahead = nil  -- the rules may grant it, and numbers are given in the order of the claims
        break
      end
    end
    if ahead and grants > 0 then counter = checked_number(redis.call('INCRBY', counter_key, grants)) - grants end
  end
  for i = 1, count do
    local claim, record_key, source_key = ARGV[a], KEYS[k], nil
    local mode = byte(claim)
    a, k = a + 1, k + 1
    if mode == SEQUENCED or mode == DOCUMENT then
      source_key = KEYS[k]
      k = k + 1
    end
    local reply, row, answer
    if not epoch then
      reply = 'N'
    elseif mode == KEYED or mode == LOCK or (mode == DOCUMENT and ahead) then
      local data
      if mode == DOCUMENT then
        data = nil
      elseif ahead then
        data = ahead[i]
      else
        data = redis.call('GET', record_key)
      end
      if not data then
        local number
        if counter then
          counter = counter + 1
          number = counter
        else
          number = checked_number(redis.call('INCR', counter_key))
        end
        data, row = first_grant(claim, epoch, number, now_ms, ts, shard)
        local ttl_ms = $unpack(claim.pending_ttl, claim, source_key and $claim.source_ttl.at or $claim.pending_ttl.at)
        if source_key then
          put(source_key, $char(RECORD_VERSION, SOURCE_LEASE) .. $pack(source.stamp, epoch) .. sub(claim, $claim.digest) ..
            $pack(source_lease.size, #data) .. data, ttl_ms)
          pending[#pending + 1] = score(now_ms, ttl_ms)
          pending[#pending + 1] = sub(source_key, #prefix + 2)
        else
          put(record_key, data, ttl_ms)
          redis.call('ZADD', prefix .. 'p', score(now_ms, ttl_ms), sub(claim, $claim.digest))
        end
        reply = 'G\0' .. data
      elseif replays(data, claim) then
        reply, row, answer = 'R' .. data, replay_row(data, claim, ts, shard), 'd'
      end
    end
    if not reply then
      settle = settle or rules()
      reply, row, answer = settle(claim, record_key, source_key, epoch, solo, now_ms, counter_key, prefix, shard)
    end
    if answer then
      local what = label(answer, 0, kind_of_claim(claim), claim, $claim.rest)
      answers[what] = (answers[what] or 0) + 1
    end
    replies[#replies + 1] = reply
    rows[#rows + 1] = row
  end
  if #pending > 0 then redis.call('ZADD', prefix .. 'q', unpack(pending)) end
  for what, n in pairs(answers) do tally(prefix, now_ms, what, n) end
  add_rows(rows_key, table.concat(rows), most_rows)
end
if ARGV[4] ~= '' then return replies[1] end
return replies
