-- For every script that reads more than one record: constants and markers.

local HELD, RELEASED, QUARANTINED, SEALED, FAILED, LOCKED = $HELD, $RELEASED, $QUARANTINED, $SEALED, $FAILED, $LOCKED
local KEYED, SEQUENCED, DOCUMENT, LOCK = $KEYED, $SEQUENCED, $DOCUMENT, $LOCK

-- `R:<epoch>:<run_id>` or `H:<epoch>:<run_id>`; the run_id is that of INFO.
local function read_marker(marker_key)
  local text = redis.call('GET', marker_key)
  if not text then return nil end
  return { ready = byte(text) == $code(R), epoch = tonumber(sub(text, $MARKER_EPOCH)), run = sub(text, $MARKER_RUN) }
end

-- Lua counts to 2^53. An epoch that was cut off would let a stale owner in.
local function write_marker(marker_key, state, epoch, run)
  if epoch > $MAX_EPOCH then error(string.format('epoch %.0f is out of range', epoch)) end
  redis.call('SET', marker_key, string.format('%s:%.0f:%s', state, epoch, run))
end

-- The epoch of a shard that may answer, or nil. `solo`: there is no object store, so a marker that is absent or of
-- another run is set here, to an epoch above every earlier one.
local function usable_epoch(marker_key, run, solo, now_ms)
  local text = redis.call('GET', marker_key)
  if text and byte(text) == $code(R) and sub(text, $MARKER_RUN) == run then
    return tonumber(sub(text, $MARKER_EPOCH))
  end
  if not solo then return nil end
  local m = read_marker(marker_key)
  local epoch = math.max(m and m.epoch + 1 or 0, now_ms * 1000)
  write_marker(marker_key, $READY, epoch, run)
  return epoch
end

-- The values of a group, read in one call, if no item can change what another one reads: all are KEYED and no key occurs
-- twice, or all are DOCUMENT and no source does. Otherwise nil, and each item reads its own. The keys start at `k`; a
-- document has two values, its record and its source.
local function read_ahead(packed_from, k, count)
  local mode = byte(ARGV[packed_from])
  if mode == SEQUENCED or mode == LOCK or (mode == KEYED and count < 2) or count > 500 then return nil end -- unpack() is limited by Lua's stack
  local stride, names, seen = mode == KEYED and 1 or 2, {}, {}
  for i = 1, count do
    k = k + stride
    local name = KEYS[k - 1]
    if byte(ARGV[packed_from + i - 1]) ~= mode or seen[name] then return nil end
    seen[name] = true
    if mode == DOCUMENT then names[#names + 1] = KEYS[k - 2] end
    names[#names + 1] = name
  end
  return redis.call('MGET', unpack(names))
end
