-- What even the shortest call needs. Kept short: a script makes its functions anew each time it is called, and that
-- costs more than most of what they do.
-- now() is put in front of this file by the client: it reads TIME, and tests replace it.

local byte, sub, char = string.byte, string.sub, string.char

local function run_id()
  local info = redis.call('INFO', 'server')
  local at = string.find(info, 'run_id:', 1, true)
  return sub(info, at + 7, at + 46)
end

local function put(key, data, ttl_ms)
  if ttl_ms > 0 then
    redis.call('SET', key, data, 'PX', ttl_ms)
  else
    redis.call('SET', key, data)
  end
end

-- One stream entry per batch and shard. `most_rows` bounds the stream where nothing can be drained from it.
local function add_rows(rows_key, data, most_rows)
  if data == '' then return end
  if most_rows ~= '0' then
    redis.call('XADD', rows_key, 'MAXLEN', '~', most_rows, '*', 'd', data)
  else
    redis.call('XADD', rows_key, '*', 'd', data)
  end
end
