-- The scripts of the Redis store. A script is one atomic move. Every key it is given lies in one slot of a cluster: a run
-- belongs to a bucket, whose number is the hash tag of all its keys.
--
-- Keys of a run come in this order, 1 row (hash), 2 log (list of records), 3 state (string), 4 inbox (hash), 5 unfinished and
-- 6 runs (sorted sets of ids, the bucket's indexes), 7 used (set of the ids of expired runs), 8 ended (sorted set of the ids of
-- final runs by updated_at, since layout 2). What is written first fails
-- where a key holds another type, or the server has no room: then nothing was written. The row comes last but for the indexes.
--
-- Times ending in _at are milliseconds UTC, but for heartbeat_at, microseconds UTC, by the server's clock. Status numbers
-- are those of RunStatus, 2 to 4 wait for somebody, from 8 on final, 11 deleted. An answer is posted * 4 + 0 ok, 1 fenced,
-- 2 moved. No number or time is empty text. A list of values comes as their sizes in four bytes each, then the values.

-- append: the guarded update of one run that runs, or shall run again, under its owner, and its records
-- ARGV 1 epoch, 2 owner, 3 number and 4 head as they must be; 5 step, 6 number, 7 head, 8 attempts, 9 seal, 10 seen,
-- 11 wake_at as they shall be; then the records
local row = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'number', 'head', 'status', 'step', 'posted', 'heartbeat_at', 'ttl_ms')
if not row[1] then return 1 end
local posted = tonumber(row[7])
if row[1] ~= ARGV[1] or row[2] ~= ARGV[2] then return posted * 4 + 1 end
if row[3] == ARGV[6] and row[4] == ARGV[7] then return posted * 4 end
if tonumber(row[5]) >= 8 then return posted * 4 + 1 end
if row[3] ~= ARGV[3] or row[4] ~= ARGV[4] then return posted * 4 + 2 end
local on = tonumber(ARGV[5]) - tonumber(row[6])
if on ~= 0 and on ~= 1 then return posted * 4 + 2 end
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local beat, ahead = time[1] * 1000000 + time[2], tonumber(row[8]) - (time[1] * 1000000 + time[2])
if ahead >= 0 and ahead <= 1000000 then beat = beat + ahead + 1 end
for first = 12, #ARGV, 500 do
  redis.call('RPUSH', KEYS[2], unpack(ARGV, first, math.min(first + 499, #ARGV)))
end
local now = string.format('%.0f', ms)
local wake = ARGV[11]
if posted > tonumber(ARGV[10]) then wake = now end
redis.call('HSET', KEYS[1], 'status', '1', 'step', ARGV[5], 'number', ARGV[6], 'head', ARGV[7], 'attempts', ARGV[8],
  'seal', ARGV[9], 'wake_at', wake, 'heartbeat_at', string.format('%.0f', beat), 'updated_at', now)
if row[9] ~= '' then
  local ends = string.format('%.0f', ms + tonumber(row[9]))
  for i = 1, 4 do redis.call('PEXPIREAT', KEYS[i], ends) end
end
return posted * 4

-- append_any: an append of any kind: a new run, a claim, a checkpoint, another status, a settled or rekeyed record of a final run
-- ARGV 1 epoch (empty for a new run), 2 owner, 3 number, 4 head and 5 heartbeat_at (or empty) as they must be; 6 "1" where a
-- final run takes it; 7 run_id, 8 format, 9 key_id, 10 tenant, 11 kind, 12 name, 13 status, 14 step, 15 epoch, 16 owner, 17 number,
-- 18 head, 19 attempts, 20 seal, 21 lease_ms, 22 wake_at as they shall be; 23 seen; 24 ttl_ms of this store; 25 "1" where
-- 26 is the state; then the records
local row = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'number', 'head', 'status', 'step', 'posted', 'heartbeat_at', 'ttl_ms',
  'created_at')
local is_new, before_ttl = not row[1], row[9] or ''
local posted = tonumber(row[7] or '0')
if is_new then
  if ARGV[1] ~= '' then return 1 end
  if redis.call('SISMEMBER', KEYS[7], ARGV[7]) == 1 then return 1 end
  if redis.call('ZSCORE', KEYS[6], ARGV[7]) or redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) > 0 then return 1 end
  redis.call('ZSCORE', KEYS[5], ARGV[7])
  redis.call('ZSCORE', KEYS[8], ARGV[7])
else
  if row[1] == ARGV[15] and row[2] == ARGV[16] and row[3] == ARGV[17] and row[4] == ARGV[18] then return posted * 4 end
  if ARGV[1] == '' or row[1] ~= ARGV[1] or row[2] ~= ARGV[2] then return posted * 4 + 1 end
  local same = row[3] == ARGV[3] and row[4] == ARGV[4]
  local status = tonumber(row[5])
  if status >= 8 then
    local stays = status < 11 and ARGV[6] == '1' and row[5] == ARGV[13] and row[6] == ARGV[14] and row[1] == ARGV[15]
      and row[2] == ARGV[16]
    if not (same and stays) then return posted * 4 + 1 end
  end
  if not same then return posted * 4 + 2 end
  if ARGV[5] ~= '' and ARGV[5] ~= row[8] then return posted * 4 + 1 end
  local on = tonumber(ARGV[14]) - tonumber(row[6])
  if on ~= 0 and on ~= 1 then return posted * 4 + 2 end
end
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local now = string.format('%.0f', ms)
local beat = time[1] * 1000000 + time[2]
if not is_new then
  local ahead = tonumber(row[8]) - beat
  if ahead >= 0 and ahead <= 1000000 then beat = beat + ahead + 1 end
end
local start = 26
if ARGV[25] == '1' then start = 27 end
for first = start, #ARGV, 500 do
  redis.call('RPUSH', KEYS[2], unpack(ARGV, first, math.min(first + 499, #ARGV)))
end
if ARGV[25] == '1' then redis.call('SET', KEYS[3], ARGV[26]) end
local wake = ARGV[22]
if posted > tonumber(ARGV[23]) then wake = now end
local ttl = before_ttl
if is_new or ARGV[15] ~= row[1] then ttl = ARGV[24] end
redis.call('HSET', KEYS[1], 'run_id', ARGV[7], 'format', ARGV[8], 'key_id', ARGV[9], 'tenant', ARGV[10], 'kind', ARGV[11],
  'name', ARGV[12], 'status', ARGV[13], 'step', ARGV[14], 'epoch', ARGV[15], 'owner', ARGV[16], 'number', ARGV[17],
  'head', ARGV[18], 'attempts', ARGV[19], 'seal', ARGV[20], 'lease_ms', ARGV[21], 'wake_at', wake,
  'heartbeat_at', string.format('%.0f', beat), 'posted', string.format('%.0f', posted), 'created_at', row[10] or now,
  'updated_at', now, 'ttl_ms', ttl)
local status = tonumber(ARGV[13])
if is_new then redis.pcall('ZADD', KEYS[6], 0, ARGV[7]) end
if status < 8 then
  redis.pcall('ZADD', KEYS[5], 0, ARGV[7])
else
  redis.pcall('ZREM', KEYS[5], ARGV[7])
  redis.pcall('ZADD', KEYS[8], now, ARGV[7])
end
if ttl ~= '' and (status == 1 or status >= 8) then
  local ends = string.format('%.0f', ms + tonumber(ttl))
  for i = 1, 4 do redis.call('PEXPIREAT', KEYS[i], ends) end
elseif ttl ~= '' or before_ttl ~= '' then
  for i = 1, 4 do redis.call('PERSIST', KEYS[i]) end
end
return posted * 4

-- renew: the owner lives; guarded by epoch and owner alone, and all keys of the run live on with it
-- ARGV 1 epoch, 2 owner, 3 seen (or empty), 4 wake_at where that many messages came
local row = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'status', 'posted', 'heartbeat_at', 'ttl_ms')
if not row[1] then return 1 end
local posted = tonumber(row[4])
local status = tonumber(row[3])
if status >= 8 or row[1] ~= ARGV[1] or row[2] ~= ARGV[2] then return posted * 4 + 1 end
local time = redis.call('TIME')
local beat = time[1] * 1000000 + time[2]
local ahead = tonumber(row[5]) - beat
if ahead >= 0 and ahead <= 1000000 then beat = beat + ahead + 1 end
redis.call('HSET', KEYS[1], 'heartbeat_at', string.format('%.0f', beat))
if ARGV[3] == row[4] then redis.call('HSET', KEYS[1], 'wake_at', ARGV[4]) end
if row[6] ~= '' and status == 1 then
  local ends = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(row[6]))
  for i = 1, 4 do redis.call('PEXPIREAT', KEYS[i], ends) end
end
return posted * 4

-- post: a message, once by its digest; one more is posted, and there is reason to look at the run
-- ARGV 1 digest, 2 kind, 3 the message packed
local row = redis.call('HMGET', KEYS[1], 'status', 'posted', 'ttl_ms')
if not row[1] then return 1 end
local status, posted = tonumber(row[1]), tonumber(row[2])
if status == 11 then return 1 end
if redis.call('HEXISTS', KEYS[4], ARGV[1]) == 1 then return posted * 4 end
if status >= 8 and ARGV[2] ~= 'settlement' then return posted * 4 + 1 end
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
posted = posted + 1
local count = string.format('%.0f', posted)
redis.call('HSET', KEYS[4], ARGV[1], count .. ':' .. ARGV[3])
redis.call('HSET', KEYS[1], 'posted', count, 'wake_at', string.format('%.0f', ms))
if row[3] ~= '' and (status == 1 or status >= 8) then
  local ends = string.format('%.0f', ms + tonumber(row[3]))
  for i = 1, 4 do redis.call('PEXPIREAT', KEYS[i], ends) end
end
return posted * 4

-- bury_run: what is left of a deleted run, so that its id is not used again
-- ARGV 1 epoch, 2 owner, 3 number, 4 head as they must be; 5 run_id; 6 no owner, 7 no head
local row = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'number', 'head', 'status', 'posted')
if not row[1] then return 1 end
local posted = tonumber(row[6])
if row[5] == '11' then return 1 end
if row[1] ~= ARGV[1] or row[2] ~= ARGV[2] then return posted * 4 + 1 end
if row[3] ~= ARGV[3] or row[4] ~= ARGV[4] then return posted * 4 + 2 end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], 'status', '11', 'number', '0', 'owner', ARGV[6], 'head', ARGV[7], 'seal', '', 'wake_at', '',
  'updated_at', now, 'ttl_ms', '')
redis.call('PERSIST', KEYS[1])
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
redis.pcall('ZREM', KEYS[5], ARGV[5])
redis.pcall('ZADD', KEYS[6], 0, ARGV[5])
redis.pcall('ZADD', KEYS[8], now, ARGV[5])
return posted * 4

-- select_run: one run's row, the time, its state if it has one, its records past a number, all of one moment
-- ARGV 1 the number, or empty for no records. Gives nothing where there is no run.
local row = redis.call('HMGET', KEYS[1], 'run_id', 'format', 'key_id', 'tenant', 'kind', 'name', 'status', 'step', 'epoch', 'owner',
  'number', 'head', 'attempts', 'seal', 'lease_ms', 'wake_at', 'heartbeat_at', 'posted', 'created_at', 'updated_at')
if not row[1] then
  if redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) > 0 then return redis.error_reply('HALFRUN ' .. KEYS[1]) end
  return false
end
local time = redis.call('TIME')
row[21] = string.format('%.0f', time[1] * 1000000 + time[2])
local sizes = {}
for i = 1, 21 do
  row[i] = row[i] or ''
  sizes[i] = struct.pack('>I4', #row[i])
end
local records = ''
if ARGV[1] ~= '' then records = table.concat(redis.call('LRANGE', KEYS[2], ARGV[1], -1)) end
return {table.concat(sizes) .. table.concat(row), redis.call('GET', KEYS[3]), records}

-- select_rows: the rows of many runs of one bucket, given by their row keys; in the place of each that is not there, nothing
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local found = {}
for i = 1, #KEYS do
  local row = redis.call('HMGET', KEYS[i], 'run_id', 'format', 'key_id', 'tenant', 'kind', 'name', 'status', 'step', 'epoch',
    'owner', 'number', 'head', 'attempts', 'seal', 'lease_ms', 'wake_at', 'heartbeat_at', 'posted', 'created_at', 'updated_at')
  found[i] = ''
  if row[1] then
    row[21] = now
    local sizes = {}
    for j = 1, 21 do
      row[j] = row[j] or ''
      sizes[j] = struct.pack('>I4', #row[j])
    end
    found[i] = table.concat(sizes) .. table.concat(row)
  end
end
return found

-- select_messages: the messages of a run, each behind its size, in no order; each begins with its place
local found = redis.call('HGETALL', KEYS[4])
local packed = {}
for i = 1, #found, 2 do
  packed[i] = struct.pack('>I4I4', #found[i], #found[i + 1])
  packed[i + 1] = found[i] .. found[i + 1]
end
return table.concat(packed)

-- list_ids: ids of an index of one bucket, from the first past ARGV 1, at most ARGV 2, each behind its size
local found = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], '+', 'LIMIT', 0, ARGV[2])
for i = 1, #found do found[i] = struct.pack('>I4', #found[i]) .. found[i] end
return table.concat(found)

-- list_ended: ids of an index by time and their times, the newest first: those up to the time ARGV 1, past the first ARGV 2 of
-- them, at most ARGV 3. KEYS 1 ended, 2 unfinished, 3 runs. Before them "1" where each run of the bucket has its place in one of
-- the first two, and "0" where the indexes are to be mended.
local whole = redis.call('ZCARD', KEYS[1]) + redis.call('ZCARD', KEYS[2]) == redis.call('ZCARD', KEYS[3])
local found = redis.call('ZREVRANGEBYSCORE', KEYS[1], ARGV[1], '-inf', 'WITHSCORES', 'LIMIT', ARGV[2], ARGV[3])
table.insert(found, 1, whole and '1' or '0')
return found

-- mend_index: bring the indexes of a bucket to what is stored of the run ARGV 1; the id of an expired run counts as used
local row = redis.call('HMGET', KEYS[1], 'status', 'updated_at')
local status, changed = row[1], 0
if not status then
  changed = redis.call('ZREM', KEYS[5], ARGV[1]) + redis.call('ZREM', KEYS[8], ARGV[1])
  if redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) > 0 or not redis.call('ZSCORE', KEYS[6], ARGV[1]) then return changed end
  redis.call('SADD', KEYS[7], ARGV[1])
  return changed + redis.call('ZREM', KEYS[6], ARGV[1])
end
changed = redis.call('ZADD', KEYS[6], 0, ARGV[1])
if (tonumber(status) or 0) < 8 then
  return changed + redis.call('ZADD', KEYS[5], 0, ARGV[1]) + redis.call('ZREM', KEYS[8], ARGV[1])
end
return changed + redis.call('ZREM', KEYS[5], ARGV[1]) + redis.call('ZADD', KEYS[8], 'CH', tonumber(row[2]) or 0, ARGV[1])

-- set_up: make the mark of a store where there is none; what stands there otherwise
-- KEYS 1 the mark; ARGV 1 program, 2 format
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'none' then
  redis.call('HSET', KEYS[1], 'program', ARGV[1], 'format', ARGV[2])
  return {ARGV[1], ARGV[2]}
end
if kind ~= 'hash' then return {kind, ''} end
local found = redis.call('HMGET', KEYS[1], 'program', 'format')
return {found[1] or 'hash', found[2] or ''}

-- read_mark: what stands where the mark of a store belongs; nothing where there is none
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'none' then return false end
if kind ~= 'hash' then return {kind, ''} end
local found = redis.call('HMGET', KEYS[1], 'program', 'format')
return {found[1] or 'hash', found[2] or ''}

-- begin_migration: keep others from migrating for a while, or go on doing so
-- KEYS 1 the mark; ARGV 1 who migrates, 2 for how many milliseconds, 3 the layout that is wanted. Gives the layout there is, and
-- "done", "mine" or "held".
local found = redis.call('HMGET', KEYS[1], 'format', 'migrator', 'migrates_until')
if tonumber(found[1]) >= tonumber(ARGV[3]) then return {found[1], 'done'} end
local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
if found[2] and found[2] ~= ARGV[1] and tonumber(found[3]) > ms then return {found[1], 'held'} end
redis.call('HSET', KEYS[1], 'migrator', ARGV[1], 'migrates_until', string.format('%.0f', ms + tonumber(ARGV[2])))
return {found[1], 'mine'}

-- end_migration: the layout is reached, by who still migrates
-- KEYS 1 the mark; ARGV 1 who migrated, 2 the layout. Gives 1 where it was still theirs to say.
if redis.call('HGET', KEYS[1], 'migrator') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'format', ARGV[2])
redis.call('HDEL', KEYS[1], 'migrator', 'migrates_until')
return 1
