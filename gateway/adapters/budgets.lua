-- Money over several scopes in one atomic step. Model: core/ledger.py. Reasons: docs/adr/0003.
--
-- KEYS  1 epoch   hash: epoch, run (the server's run id at the rebuild), or loading while one is under way
--       2 posted  hash: scope -> nano-dollars spent for good
--       3 held    hash: scope -> nano-dollars of open holds
--       4 open    sorted set: hold id -> end of its lease, ms of the server's clock
--       5 the hold: hash: state, granted, charged, over, n, s1..sn; or the prefix of all holds (rebuild)
-- ARGV  1 operation  2 the caller's epoch, "" for none  3.. the operation's own
-- Replies {status, ...}: ok | stale | refused | closed | unknown | join | load
--
-- All keys share one hash tag. Redis 6.2 is enough. Lua numbers are doubles: exact up to 2^53.

redis.replicate_commands() -- TIME and INFO come before writes; the default since Redis 7

local EPOCH, POSTED, HELD, OPEN, HOLD = unpack(KEYS)
local OP, CALLER = ARGV[1], ARGV[2]
local NANO_MAX = 9007199254740991
local SETTLED_KEPT_S = 86400

local function nano(text)
  local n = tonumber(text)
  assert(n and n >= 0 and n <= NANO_MAX and n % 1 == 0, 'not an amount of nano-dollars: ' .. tostring(text))
  return n
end

local function get(hash, scope)
  return tonumber(redis.call('HGET', hash, scope) or 0)
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- The epoch in force; false after a flush, a restart with old data, or a failover to a replica.
local function epoch()
  local known = redis.call('HMGET', EPOCH, 'epoch', 'run')
  return known[1] and known[2] == run_id() and known[1]
end

local function add_held(scope, amount)
  if redis.call('HINCRBY', HELD, scope, amount) == 0 then
    redis.call('HDEL', HELD, scope)
  end
end

local function open_hold(id, granted, lease_ms, scopes)
  redis.call('HSET', HOLD, 'state', 'open', 'granted', granted, 'n', #scopes)
  for i, scope in ipairs(scopes) do
    redis.call('HSET', HOLD, 's' .. i, scope)
    add_held(scope, granted)
  end
  redis.call('ZADD', OPEN, now_ms() + lease_ms, id)
end

local op = {}

-- id, amount, least, lease_ms, then scope and limit ("" for none) in turns
function op.hold()
  local known = redis.call('HMGET', HOLD, 'state', 'granted')
  if known[1] then
    return { known[1] == 'open' and 'ok' or 'closed', tonumber(known[2]) }
  end
  local granted, least, scopes = nano(ARGV[4]), nano(ARGV[5]), {}
  for i = 7, #ARGV, 2 do
    local scope = ARGV[i]
    local limit = ARGV[i + 1] == '' and NANO_MAX or nano(ARGV[i + 1])
    local left = limit - get(POSTED, scope) - get(HELD, scope)
    if left < least then
      return { 'refused', #scopes, left }
    end
    granted = math.min(granted, left)
    scopes[#scopes + 1] = scope
  end
  open_hold(ARGV[3], granted, tonumber(ARGV[6]), scopes)
  return { 'ok', granted }
end

-- id, granted, lease_ms, scopes: a hold from before the rebuild; one that is known, open or settled, is left alone
function op.restore()
  if redis.call('EXISTS', HOLD) == 0 then
    open_hold(ARGV[3], nano(ARGV[4]), tonumber(ARGV[5]), { unpack(ARGV, 6) })
  end
  return { 'ok' }
end

-- id, posted | voided | uncertain, actual
function op.settle()
  local known = redis.call('HMGET', HOLD, 'state', 'granted', 'charged', 'n')
  if not known[1] then
    return { 'unknown' }
  end
  if known[1] ~= 'open' then
    return { 'ok', tonumber(known[3]) }
  end
  local granted = tonumber(known[2])
  local charged = ({ posted = nano(ARGV[5]), voided = 0, uncertain = granted })[ARGV[4]]
  for i = 1, tonumber(known[4]) do
    local scope = redis.call('HGET', HOLD, 's' .. i)
    add_held(scope, 0 - granted) -- not -granted: that is "-0" for a free request, which Redis refuses
    if charged > 0 then
      redis.call('HSET', POSTED, scope, math.min(NANO_MAX, get(POSTED, scope) + charged))
    end
  end
  redis.call('HSET', HOLD, 'state', ARGV[4], 'charged', charged, 'over', math.max(0, charged - granted))
  redis.call('EXPIRE', HOLD, SETTLED_KEPT_S)
  redis.call('ZREM', OPEN, ARGV[3])
  return { 'ok', charged }
end

-- id, lease_ms
function op.renew()
  if not redis.call('ZSCORE', OPEN, ARGV[3]) then
    return { 'ok', 0 }
  end
  redis.call('ZADD', OPEN, now_ms() + ARGV[4], ARGV[3])
  return { 'ok', 1 }
end

-- limit
function op.expired()
  return { 'ok', redis.call('ZRANGEBYSCORE', OPEN, '-inf', now_ms(), 'LIMIT', 0, ARGV[3]) }
end

-- scope
function op.balance()
  return { 'ok', get(POSTED, ARGV[3]), get(HELD, ARGV[3]) }
end

function op.ping()
  return { 'ok' }
end

-- A rebuild is begin, fill..., commit under one token; everyone else is stale meanwhile, and a second rebuild takes
-- over from one that died. Where an epoch is in force, because nothing was lost or another gateway has rebuilt, the
-- caller joins it.
local rebuild = {}

function rebuild.begin()
  local current = epoch()
  if current then
    return { 'join', current }
  end
  for _, id in ipairs(redis.call('ZRANGE', OPEN, 0, -1)) do
    redis.call('DEL', HOLD .. id)
  end
  redis.call('DEL', EPOCH, POSTED, HELD, OPEN)
  redis.call('HSET', EPOCH, 'loading', ARGV[3])
  return { 'load' }
end

local function is_mine()
  return redis.call('HGET', EPOCH, 'loading') == ARGV[3]
end

-- token, then scope and posted nano-dollars in turns
function rebuild.fill()
  if not is_mine() then
    return { 'stale' }
  end
  for i = 4, #ARGV, 2 do
    redis.call('HSET', POSTED, ARGV[i], nano(ARGV[i + 1]))
  end
  return { 'ok' }
end

function rebuild.commit()
  if not is_mine() then
    return { 'stale' }
  end
  local t = redis.call('TIME')
  local opened = t[1] .. string.format('%06d', t[2])
  redis.call('DEL', EPOCH)
  redis.call('HSET', EPOCH, 'epoch', opened, 'run', run_id())
  return { 'ok', opened }
end

if rebuild[OP] then
  return rebuild[OP]()
end
if epoch() ~= CALLER then
  return { 'stale' }
end
return op[OP]()
