-- The vendor state of tool calls: one hash of states and one sorted set of their times for each API key, so that what a
-- key may keep is bounded, and the oldest state makes room.
--
-- KEYS  1 hash: id -> state; '#bytes' -> their size  2 sorted set: id -> milliseconds at which it was kept
-- ARGV  1 operation
--       put:  2 milliseconds for which states are kept  3 most bytes of a key  4.. id, state, id, state, ...
--       load: 2 milliseconds for which states are kept  3.. ids
-- Replies {} to put, and to load {id, state, ...} of those that are known

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local keep_ms = tonumber(ARGV[2])

if ARGV[1] == 'load' then
  local states = {}
  for i = 3, #ARGV do
    local kept_ms = redis.call('ZSCORE', KEYS[2], ARGV[i])
    if kept_ms and tonumber(kept_ms) + keep_ms > now_ms then
      table.insert(states, ARGV[i])
      table.insert(states, redis.call('HGET', KEYS[1], ARGV[i]))
    end
  end
  return states
end

local function drop(id)
  local size = redis.call('HSTRLEN', KEYS[1], id)
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('HINCRBY', KEYS[1], '#bytes', 0 - size)
end

for i = 4, #ARGV, 2 do
  drop(ARGV[i])
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[2], now_ms, ARGV[i])
  redis.call('HINCRBY', KEYS[1], '#bytes', #ARGV[i + 1])
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms - keep_ms, 'LIMIT', 0, 256)) do
  drop(id)
end
while tonumber(redis.call('HGET', KEYS[1], '#bytes')) > tonumber(ARGV[3]) do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)
  if not oldest[1] then
    break
  end
  drop(oldest[1])
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
redis.call('PEXPIRE', KEYS[2], keep_ms)
return {}
