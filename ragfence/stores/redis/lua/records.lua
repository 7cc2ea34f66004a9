-- Reads and writes records and decision rows. core/layout.py says where their bytes are.

local NO_METADATA = $zeros(head.metadata_hash)
local NOBODY = $zeros(record.token)

local function short(text) return char(#text) .. text end
local function long(text) return $pack(head.size, #text) .. text end

-- Reads length:1 + bytes at `at`; returns the bytes and where the next field starts.
local function read_short(data, at)
  local size = byte(data, at)
  return sub(data, at + 1, at + size), at + 1 + size
end

local function read_long(data, at)
  local size, start = $unpack(head.size, data, at)
  return sub(data, start, start + size - 1), start + size
end

-- A record of a newer format, or in a state of a newer one, decodes to {newer = true}, and the client refuses it.
local function decode_record(data)
  if not data or data == '' then return nil end
  if byte(data) ~= $RECORD_VERSION or $state(byte(data, $record.state.at)) > LOCKED then
    return { newer = true, raw = data }
  end
  local r = { raw = data }
  local at, _
  _, r.state, r.fingerprint, r.token, r.epoch, r.counter, r.attempt, r.first_seen, r.when, at =
    $unpack(record, data)
  local flags = r.state
  r.state = $state(flags)
  r.owner, r.error, r.effect_id, r.payload = '', '', '', ''
  r.kind, at = read_short(data, at)
  if $has(flags, HAS_OWNER) then r.owner, at = read_short(data, at) end
  if $has(flags, HAS_ERROR) then r.error, at = read_short(data, at) end
  if $has(flags, HAS_EFFECT_ID) then r.effect_id, at = read_short(data, at) end
  if $has(flags, HAS_PAYLOAD) then r.payload, at = read_long(data, at) end
  r.result = sub(data, at)
  return r
end

local function encode_record(r)
  local flags, texts = r.state, short(r.kind)
  if r.owner ~= '' then flags, texts = flags + $HAS_OWNER, texts .. short(r.owner) end
  if r.error ~= '' then flags, texts = flags + $HAS_ERROR, texts .. short(r.error) end
  if r.effect_id ~= '' then flags, texts = flags + $HAS_EFFECT_ID, texts .. short(r.effect_id) end
  if r.payload ~= '' then flags, texts = flags + $HAS_PAYLOAD, texts .. long(r.payload) end
  local data = $pack(record, $RECORD_VERSION, flags, r.fingerprint, r.token, r.epoch, r.counter, r.attempt, r.first_seen,
    r.when) .. texts .. r.result
  r.raw = data
  return data
end

local function copy_record(r, changes)
  local c = {}
  for name, value in pairs(r) do c[name] = value end
  for name, value in pairs(changes) do c[name] = value end
  encode_record(c)
  return c
end

local function ended(r) return r ~= nil and (r.state == SEALED or r.state == FAILED) end

local function decode_source(data)
  if not data then return nil end
  if byte(data) ~= $RECORD_VERSION then return { newer = true, raw = data } end
  local _, flags, stamp, at = $unpack(source, data)
  local s = { stamp = stamp, raw = data }
  if $has(flags, SOURCE_HEAD) then
    local h = {}
    h.digest, h.sequence, h.metadata_hash, at = $unpack(head.digest:metadata_hash, data, at)
    h.live = $has(flags, SOURCE_LIVE)
    if not $has(flags, SOURCE_SEQUENCE) then h.sequence = nil end
    local body
    body, at = read_long(data, at)
    h.record = decode_record(body)
    s.head = h
  end
  if $has(flags, SOURCE_LEASE) then
    local l = {}
    l.digest, at = $unpack(source_lease.digest, data, at)
    local body
    body, at = read_long(data, at)
    l.record = decode_record(body)
    l.unsettled = $has(flags, SOURCE_UNSETTLED)
    s.lease = l
  end
  for _, part in pairs({ s.head, s.lease }) do
    if part.record and part.record.newer then return part.record end
  end
  return s
end

local function encode_source(s)
  local flags, body = 0, ''
  local h, l = s.head, s.lease
  if h then
    flags = flags + $SOURCE_HEAD + (h.live and $SOURCE_LIVE or 0) + (h.sequence and $SOURCE_SEQUENCE or 0)
    body = $pack(head.digest:metadata_hash, h.digest, h.sequence or $zeros(head.sequence), h.metadata_hash) ..
      long(h.record and h.record.raw or '')
  end
  if l then
    flags = flags + $SOURCE_LEASE + (l.unsettled and $SOURCE_UNSETTLED or 0)
    body = body .. l.digest .. long(l.record.raw)
  end
  return $pack(source, $RECORD_VERSION, flags, s.stamp) .. body
end

-- Sequences are signed 64-bit numbers, more than a Lua number holds exactly: they are compared in two halves.
local function compare_sequences(a, b)
  local ah, al = $unpack(halves, a)
  local bh, bl = $unpack(halves, b)
  if ah ~= bh then return ah < bh and -1 or 1 end
  if al ~= bl then return al < bl and -1 or 1 end
  return 0
end

-- What is stored for one item: its record and, unless it is KEYED or a LOCK, its source. Void records are left out.
local function read_held(item, epoch, solo)
  local held = {}
  local data = redis.call('GET', item.record_key)
  if data then
    if item.mode == DOCUMENT then
      local stamp = $unpack(parked.stamp, data)
      if solo or stamp == epoch then held.record = decode_record(sub(data, $parked.rest)) end
      held.stored = true
    else
      held.record = decode_record(data)
    end
  end
  if item.mode == SEQUENCED or item.mode == DOCUMENT then
    held.source = decode_source(redis.call('GET', item.source_key))
    if held.source and not held.source.newer and not solo and held.source.stamp ~= epoch then held.source = nil end
  end
  held.newer = (held.record and held.record.newer and held.record.raw) or
    (held.source and held.source.newer and held.source.raw)
  return held
end

-- Decision rows. r: row_id fields, times and texts, as in core/decision_rows.py.
local ROW = { new = $NEW, duplicate = $DUPLICATE, conflict = $CONFLICT, in_flight = $IN_FLIGHT, stale = $STALE }

local function encode_row(r)
  return $pack(row, $ROW_VERSION, r.token, r.position, r.ts, r.kind, r.flags or 0, r.waited or 0, r.expires or 0, r.key,
    r.fingerprint, r.winner or NOBODY, r.epoch or 0, r.counter or 0, r.attempt or 0, r.first_seen or 0,
    r.sealed_at or 0) .. short(r.effect_id or '') .. short(r.error or '') .. long(r.context)
end
