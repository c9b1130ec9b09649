-- The breakers of workers, which processes and gateways share: one hash, id of a place or account -> its breaker.
--
-- KEYS  1 hash: id -> '<seconds at which it changed> <breaker>'
-- ARGV  1 milliseconds for which nobody needs to ask before all of it is forgotten  2.. id, seconds, breaker, ...
-- Replies {id, breaker, ...} of all that are stored

for i = 2, #ARGV, 3 do
  local stored = redis.call('HGET', KEYS[1], ARGV[i])
  if not stored or tonumber(string.match(stored, '^%S+')) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1] .. ' ' .. ARGV[i + 2])
    redis.call('PEXPIRE', KEYS[1], ARGV[1])
  end
end
local all = redis.call('HGETALL', KEYS[1])
for i = 2, #all, 2 do
  all[i] = string.match(all[i], '^%S+ (.*)$')
end
return all
