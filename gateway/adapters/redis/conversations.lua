-- Which worker a conversation goes back to: one string a mark, each with the time for which it counts.
--
-- KEYS  one a mark
-- ARGV  1 operation  2.. put: worker, then milliseconds for each key
-- Replies {worker} of the first key that is known, or {}

if ARGV[1] == 'put' then
  for i, key in ipairs(KEYS) do
    redis.call('SET', key, ARGV[2], 'PX', ARGV[2 + i])
  end
  return {}
end
for _, key in ipairs(KEYS) do
  local worker = redis.call('GET', key)
  if worker then
    return { worker }
  end
end
return {}
