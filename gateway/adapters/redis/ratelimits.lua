-- Requests and tokens in a sliding window, and requests in flight, of one API key.
--
-- The window is exact: each admitted request is kept with its time until it leaves the window, so "when does one more
-- fit" has a true answer. A key's memory and the work of a call are bounded by its own limits.
--
-- KEYS  1 at      sorted set: request -> time of admission, ms
--       2 tokens  hash: request -> tokens; field "" is the sum over the window
--       3 flight  sorted set: request -> when its place is free again even if nobody releases it, ms
-- ARGV  1 operation  2 request  3 tokens ("" for none)
--       admit only: 4 window_ms  5 lease_ms  6 requests  7 tokens  8 in flight (limits, "" for none)
-- Replies {"ok", requests in window, tokens in window, ms until the window is empty} or {"requests" | "tokens" | "in_flight", wait_ms}

redis.replicate_commands() -- TIME comes before writes; the default since Redis 7

local AT, TOKENS, FLIGHT = unpack(KEYS)
local REQUEST = ARGV[2]
local IN_FLIGHT_WAIT_MS = 1000 -- nobody knows when a request ends

local function number(text)
  return text ~= '' and tonumber(text) or nil
end

local function tokens_of(request)
  return tonumber(redis.call('HGET', TOKENS, request) or 0)
end

local function remove(request)
  redis.call('HINCRBY', TOKENS, '', 0 - tokens_of(request)) -- never "-0", which Redis refuses
  redis.call('HDEL', TOKENS, request)
  redis.call('ZREM', AT, request)
end

local function set_tokens(request, tokens)
  redis.call('HINCRBY', TOKENS, '', tokens - tokens_of(request))
  redis.call('HSET', TOKENS, request, tokens)
end

local function slide(now, window_ms)
  for _, request in ipairs(redis.call('ZRANGEBYSCORE', AT, '-inf', now - window_ms)) do
    remove(request)
  end
end

-- Milliseconds until the request at that rank has left the window.
local function leaves_in(rank, now, window_ms)
  local entry = redis.call('ZRANGE', AT, rank, rank, 'WITHSCORES')
  return entry[2] and entry[2] + window_ms - now or window_ms
end

local function requests_wait(now, window_ms, limit)
  local count = redis.call('ZCARD', AT)
  return limit and count >= limit and leaves_in(count - limit, now, window_ms) or 0
end

local function tokens_wait(now, window_ms, limit, wanted)
  local excess = limit and tokens_of('') + wanted - limit or 0
  local rank = -1
  while excess > 0 do
    rank = rank + 1
    local request = redis.call('ZRANGE', AT, rank, rank)[1]
    if not request then
      return window_ms
    end
    excess = excess - tokens_of(request)
  end
  return rank >= 0 and leaves_in(rank, now, window_ms) or 0
end

local op = {}

function op.admit()
  local t = redis.call('TIME')
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  local wanted, window_ms, lease_ms = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
  local requests_max, tokens_max, in_flight_max = number(ARGV[6]), number(ARGV[7]), number(ARGV[8])
  slide(now, window_ms)
  redis.call('ZREMRANGEBYSCORE', FLIGHT, '-inf', now)
  local is_new = not redis.call('ZSCORE', AT, REQUEST) and not redis.call('ZSCORE', FLIGHT, REQUEST)
  if is_new then
    local by_requests = requests_wait(now, window_ms, requests_max)
    local by_tokens = tokens_wait(now, window_ms, tokens_max, wanted)
    if by_requests > 0 or by_tokens > 0 then
      return { by_requests >= by_tokens and 'requests' or 'tokens', math.max(by_requests, by_tokens) }
    end
    if in_flight_max and redis.call('ZCARD', FLIGHT) >= in_flight_max then
      return { 'in_flight', IN_FLIGHT_WAIT_MS }
    end
    if requests_max or tokens_max then
      redis.call('ZADD', AT, now, REQUEST)
      redis.call('HSET', TOKENS, REQUEST, wanted)
      redis.call('HINCRBY', TOKENS, '', wanted)
      redis.call('PEXPIRE', AT, 2 * window_ms)
      redis.call('PEXPIRE', TOKENS, 2 * window_ms)
    end
    if in_flight_max then
      redis.call('ZADD', FLIGHT, now + lease_ms, REQUEST)
      redis.call('PEXPIRE', FLIGHT, lease_ms)
    end
  end
  if not is_new and redis.call('ZSCORE', AT, REQUEST) then
    local wait = tokens_wait(now, window_ms, tokens_max, wanted - tokens_of(REQUEST))
    if wait > 0 then
      return { 'tokens', wait }
    end
    set_tokens(REQUEST, wanted)
  end
  local count = redis.call('ZCARD', AT)
  return { 'ok', count, tokens_of(''), count > 0 and leaves_in(-1, now, window_ms) or 0 }
end

function op.release()
  redis.call('ZREM', FLIGHT, REQUEST)
  local used = number(ARGV[3])
  if used and redis.call('ZSCORE', AT, REQUEST) then
    set_tokens(REQUEST, used)
  end
  return { 'ok', 0, 0 }
end

function op.withdraw()
  redis.call('ZREM', FLIGHT, REQUEST)
  if redis.call('ZSCORE', AT, REQUEST) then
    remove(REQUEST)
  end
  return { 'ok', 0, 0 }
end

return op[ARGV[1]]()
