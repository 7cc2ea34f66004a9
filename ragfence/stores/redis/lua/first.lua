-- For every call, the shortest included. Keep it short: a script creates its functions anew at every call, which costs
-- more than most of what they do.
-- The client puts now() in front of this file. It reads TIME; tests replace it.

local byte, sub, char = string.byte, string.sub, string.char

local function run_id()
  local info = redis.call('INFO', 'server')
  local _, before = string.find(info, 'run_id:', 1, true)
  return sub(info, before + 1, before + $RUN_ID_CHARACTERS)
end

local function put(key, data, ttl_ms)
  if ttl_ms > 0 then
    redis.call('SET', key, data, 'PX', ttl_ms)
  else
    redis.call('SET', key, data)
  end
end

-- One stream entry per batch and shard. `most_rows` bounds the stream if nothing drains it.
local function add_rows(rows_key, data, most_rows)
  if data == '' then return end
  if most_rows ~= '0' then
    redis.call('XADD', rows_key, 'MAXLEN', '~', most_rows, '*', 'd', data)
  else
    redis.call('XADD', rows_key, '*', 'd', data)
  end
end

-- Pending records are in sorted sets, by when they expire: `p` has digests of keys, `q` sources.
local function score(now_ms, ttl_ms) return ttl_ms > 0 and now_ms + ttl_ms or '+inf' end

-- The label under which an answer is counted: make_label of core/tallies.py. `lifetime`: in milliseconds, or '-'.
local function label(outcome, lifetime, kind, text, from)
  local route, _, before = '', string.find(text, ',"route":"', from, true)
  if before then
    route = sub(text, before + 1, math.min(string.find(text, '"', before + 1, true) - 1, before + $MAX_ROUTE_BYTES))
  end
  if lifetime ~= '-' then lifetime = math.ceil(lifetime / $HOUR_MS) end
  return outcome .. lifetime .. '\0' .. kind .. '\0' .. route
end

-- Counts under an hour, in the hash of its day, which expires after KEPT_DAYS. Beyond MAX_LABELS, kinds and routes are
-- counted together.
local function tally(prefix, at_ms, what, count)
  local hour = math.floor(at_ms / $HOUR_MS)
  local key, field = prefix .. 'h' .. math.floor(at_ms / $DAY_MS), hour .. ':' .. what
  if redis.call('HINCRBY', key, field, count) ~= count then return end
  if redis.call('HLEN', key) > $MAX_LABELS then
    redis.call('HDEL', key, field)
    redis.call('HINCRBY', key, hour .. ':' .. sub(what, 1, string.find(what, '\0', 1, true)) .. '\0', count)
  end
  redis.call('PEXPIRE', key, $KEPT_MS)
end
