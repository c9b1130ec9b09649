-- Money over several scopes in one atomic step. Model: core/money/ledger.py. Reasons: docs/adr/0003.
--
-- KEYS  1 epoch   hash: epoch, run (the server's run id at the rebuild), wait (ms of the server's clock until which
--                 other gateways may still put their own holds back), gen (the token of the rebuild), sizes (of the
--                 next three keys after the last call) and format; or loading, the token, while a rebuild is under way
--       2 posted  hash: scope -> nano-dollars spent for good, less what was credited
--       3 held    hash: scope -> nano-dollars of open holds
--       4 open    sorted set: hold id -> end of its lease, ms of the server's clock
--       5 the hold: hash: gen, state, granted, charged, over, n, s1..sn; or the prefix of all holds. One of another
--                 gen is from before the rebuild and does not count
-- ARGV  1 operation  2 the caller's epoch, "" for none  3.. the operation's own
-- Replies {status, ...}: ok | stale | wait | refused | closed | unknown | none | load | evicts | format
--
-- A balance that is not there counts as zero, so none may be lost unseen: a call that finds other sizes than the last
-- one left, or an open hold without its hash, ends the epoch.
--
-- FORMAT names what these keys hold. A script that writes them in another way has another one, and gateways with
-- different formats refuse to share them. Balances without the field are of format 2, or of format 1 where they have no
-- sizes either.
--
-- All keys share one hash tag. Redis 6.2 is enough. Lua numbers are doubles: exact up to 2^53.

redis.replicate_commands() -- TIME and INFO come before writes; the default since Redis 7

local EPOCH, POSTED, HELD, OPEN, HOLD = unpack(KEYS)
local OP, CALLER = ARGV[1], ARGV[2]
local FORMAT = '2'
local NANO_MAX = 9007199254740991
local SETTLED_KEPT_S = 86400
local WAIT_MS_MAX = 10000

local function nano(text)
  local n = tonumber(text)
  assert(n and n >= 0 and n <= NANO_MAX and n % 1 == 0, 'not an amount of nano-dollars: ' .. tostring(text))
  return n
end

local function total(text)
  return text:sub(1, 1) == '-' and -nano(text:sub(2)) or nano(text)
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

local function sizes()
  return redis.call('HLEN', POSTED) .. ' ' .. redis.call('HLEN', HELD) .. ' ' .. redis.call('ZCARD', OPEN)
end

local IDLE_S = OP == 'starts' and redis.pcall('OBJECT', 'IDLETIME', EPOCH) -- since another call looked
local stored = redis.call('HMGET', EPOCH, 'epoch', 'run', 'sizes', 'gen', 'loading', 'format')
local GEN = stored[4] or stored[5]
local LOST = false -- whether a hash was not there that must be

-- The format of the balances that are there; this script's where there are none.
local function format()
  return stored[6] or stored[1] and not stored[3] and '1' or FORMAT
end

-- The epoch in force; false after a flush, a restart with old data, a failover to a replica, or a lost balance.
local function epoch()
  return format() == FORMAT and stored[1] and stored[2] == run_id() and stored[3] == sizes() and stored[1]
end

-- The policy by which the server removes keys when its memory is full; nil where it removes none.
local function eviction()
  local policy = string.match(redis.call('INFO', 'memory'), 'maxmemory_policy:([%w-]+)')
  return policy ~= 'noeviction' and policy
end

-- Fields of a hold; none where there is no such hold since the rebuild.
local function fields(hold, ...)
  local values = redis.call('HMGET', hold, 'gen', ...)
  if values[1] ~= GEN then
    return {}
  end
  table.remove(values, 1)
  return values
end

local function add_held(scope, amount)
  if redis.call('HINCRBY', HELD, scope, amount) == 0 then
    redis.call('HDEL', HELD, scope)
  end
end

local function open_hold(hold, id, granted, lease_ms, scopes)
  if redis.call('EXISTS', hold) == 1 then -- after a write that needs no memory, Redis refuses none for want of it
    redis.call('DEL', hold)
  end
  redis.call('HSET', hold, 'gen', GEN, 'state', 'open', 'granted', granted, 'n', #scopes)
  for i, scope in ipairs(scopes) do
    redis.call('HSET', hold, 's' .. i, scope)
    add_held(scope, granted)
  end
  redis.call('ZADD', OPEN, now_ms() + lease_ms, id)
end

-- What was charged: now, or the first time; false for a hold nobody has heard of.
local function settle(hold, id, state, actual)
  local known = fields(hold, 'state', 'granted', 'charged', 'n')
  if known[1] ~= 'open' then
    LOST = LOST or not known[1] and redis.call('ZSCORE', OPEN, id) ~= false
    return known[1] and tonumber(known[3])
  end
  local granted = tonumber(known[2])
  local charged = ({ posted = actual, voided = 0, uncertain = granted })[state]
  for i = 1, tonumber(known[4]) do
    local scope = redis.call('HGET', hold, 's' .. i)
    add_held(scope, 0 - granted) -- not -granted: that is "-0" for a free request, which Redis refuses
    if charged > 0 then
      redis.call('HSET', POSTED, scope, math.min(NANO_MAX, get(POSTED, scope) + charged))
    end
  end
  redis.call('HSET', hold, 'state', state, 'charged', charged, 'over', math.max(0, charged - granted))
  redis.call('EXPIRE', hold, SETTLED_KEPT_S)
  redis.call('ZREM', OPEN, id)
  return charged
end

-- ARGV from `first` on as {id, amount, {scope, ...}}: each an id, an amount, how many scopes, the scopes
local function each_hold(first, visit)
  local at = first
  while at <= #ARGV do
    local n = tonumber(ARGV[at + 2])
    visit(ARGV[at], nano(ARGV[at + 1]), { unpack(ARGV, at + 3, at + 2 + n) })
    at = at + 3 + n
  end
end

-- Whether other gateways may still put their own holds back.
local function waits()
  local wait_ms = tonumber(redis.call('HGET', EPOCH, 'wait') or 0) - now_ms()
  return wait_ms > 0 and wait_ms <= WAIT_MS_MAX -- more than that: the clock was set back
end

-- From ARGV[first] on, scope and limit ("" for none) in turns: the scopes, what each has left, what each holds, and the
-- least that one of them has left.
local function rooms(first)
  local scopes, left, held, least = {}, {}, {}, NANO_MAX
  for i = first, #ARGV, 2 do
    local n, limit = #scopes + 1, ARGV[i + 1] == '' and NANO_MAX or nano(ARGV[i + 1])
    scopes[n], held[n] = ARGV[i], get(HELD, ARGV[i])
    left[n] = math.min(NANO_MAX, limit - get(POSTED, ARGV[i])) - held[n] -- a credit may make room past 2^53
    least = math.min(least, left[n])
  end
  return scopes, left, held, least
end

-- Reserve so much more for an open hold of so much, in the scopes that it has.
local function enlarge(hold, granted, more)
  for i = 1, tonumber(redis.call('HGET', hold, 'n')) do
    add_held(redis.call('HGET', hold, 's' .. i), more)
  end
  redis.call('HSET', hold, 'granted', granted + more)
end

local op = {}

-- id, amount, least, lease_ms, then scope and limit in turns. The scope that refuses is the first whose money is spent,
-- else the first whose money is held.
function op.hold()
  if waits() then
    return { 'wait' }
  end
  local known = fields(HOLD, 'state', 'granted')
  if known[1] and known[1] ~= 'open' then
    return { 'closed' }
  end
  local scopes, left, held, room = rooms(7)
  if known[1] then
    return { 'ok', tonumber(known[2]), math.max(0, room) }
  end
  local least = nano(ARGV[5])
  if room < least then
    local refused
    for i = #scopes, 1, -1 do
      local spent = left[i] + held[i] < least
      if left[i] < least and (spent or not refused or left[refused] + held[refused] >= least) then
        refused = i
      end
    end
    return { 'refused', refused - 1, left[refused], held[refused] }
  end
  local granted = math.min(nano(ARGV[4]), room)
  open_hold(HOLD, ARGV[3], granted, tonumber(ARGV[6]), scopes)
  return { 'ok', granted, room - granted }
end

-- id, total, then scope and limit in turns: the open hold grows to this total as far as each scope has room
function op.grow()
  local known = fields(HOLD, 'state', 'granted')
  if known[1] ~= 'open' then
    LOST = LOST or not known[1] and redis.call('ZSCORE', OPEN, ARGV[3]) ~= false
    return { known[1] and 'closed' or 'unknown' }
  end
  local _, _, _, room = rooms(5)
  room = waits() and 0 or math.max(0, room)
  local granted = tonumber(known[2])
  local more = math.min(room, math.max(0, nano(ARGV[4]) - granted))
  if more > 0 then
    enlarge(HOLD, granted, more)
  end
  return { 'ok', granted + more, room - more }
end

-- lease_ms, holds: from before the rebuild; a settled one is left alone, and an open one has at least what it is told
function op.restore()
  each_hold(4, function(id, granted, scopes)
    local known = fields(HOLD .. id, 'state', 'granted')
    if not known[1] then
      open_hold(HOLD .. id, id, granted, tonumber(ARGV[3]), scopes)
    elseif known[1] == 'open' and tonumber(known[2]) < granted then
      enlarge(HOLD .. id, tonumber(known[2]), granted - tonumber(known[2]))
    end
  end)
  return { 'ok' }
end

-- holds with what they were charged elsewhere: each is posted once, whether or not it was ever known here
function op.count()
  each_hold(3, function(id, charged, scopes)
    if not settle(HOLD .. id, id, 'posted', charged) then
      open_hold(HOLD .. id, id, 0, 0, scopes)
      settle(HOLD .. id, id, 'posted', charged)
    end
  end)
  return { 'ok' }
end

-- id and charge in turns, as the ledger has them: where two have settled a hold, it is the ledger's charge that counts.
-- Holds that are open or unknown are left alone. Returns how many were changed.
function op.correct()
  local changed = 0
  for i = 3, #ARGV, 2 do
    local hold, charged = HOLD .. ARGV[i], nano(ARGV[i + 1])
    local known = fields(hold, 'state', 'charged', 'granted', 'n')
    local before = known[1] and known[1] ~= 'open' and tonumber(known[2])
    if before and before ~= charged then
      for j = 1, tonumber(known[4]) do
        local scope = redis.call('HGET', hold, 's' .. j)
        local sum = get(POSTED, scope) + (charged - before) -- in this order no part of it passes 2^53
        redis.call('HSET', POSTED, scope, math.max(0 - NANO_MAX, math.min(NANO_MAX, sum)))
      end
      local over = math.max(0, charged - tonumber(known[3]))
      redis.call('HSET', hold, 'state', 'posted', 'charged', charged, 'over', over)
      changed = changed + 1
    end
  end
  return { 'ok', changed }
end

-- id, posted | voided | uncertain, actual
function op.settle()
  local charged = settle(HOLD, ARGV[3], ARGV[4], nano(ARGV[5]))
  return charged and { 'ok', charged } or { 'unknown' }
end

-- lease_ms, ids; returns those that were open. No lease is longer than this one, so one that ends later was given
-- before the clock was set back, and is cut.
function op.renew()
  local until_ms, renewed = now_ms() + ARGV[3], {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', OPEN, '(' .. until_ms, '+inf', 'LIMIT', 0, 1000)) do
    redis.call('ZADD', OPEN, until_ms, id)
  end
  for i = 4, #ARGV do
    if redis.call('ZSCORE', OPEN, ARGV[i]) then
      redis.call('ZADD', OPEN, until_ms, ARGV[i])
      renewed[#renewed + 1] = ARGV[i]
    end
  end
  return { 'ok', renewed }
end

-- ids; for each what it was charged, -1 where it is open, -2 where nobody has heard of it
function op.settled()
  local found = {}
  for i = 3, #ARGV do
    local known = fields(HOLD .. ARGV[i], 'state', 'charged')
    found[#found + 1] = known[1] and (known[1] == 'open' and -1 or tonumber(known[2])) or -2
  end
  return { 'ok', found }
end

-- limit
function op.expired()
  return { 'ok', redis.call('ZRANGEBYSCORE', OPEN, '-inf', now_ms(), 'LIMIT', 0, ARGV[3]) }
end

-- scopes; for each what it has posted and what it holds
function op.balances()
  local sums = {}
  for i = 3, #ARGV do
    sums[#sums + 1] = get(POSTED, ARGV[i])
    sums[#sums + 1] = get(HELD, ARGV[i])
  end
  return { 'ok', sums }
end

-- amount, scopes: money given back; below zero it is room beyond the limit
function op.credit()
  for i = 4, #ARGV do
    redis.call('HSET', POSTED, ARGV[i], math.max(0 - NANO_MAX, get(POSTED, ARGV[i]) - nano(ARGV[3])))
  end
  return { 'ok' }
end

-- cursor: some names of posted scopes, and where to go on
function op.names()
  local found = redis.call('HSCAN', POSTED, ARGV[3], 'COUNT', 1000)
  local names = {}
  for i = 1, #found[2], 2 do
    names[#names + 1] = found[2][i]
  end
  return { 'ok', found[1], names }
end

-- scopes: balances that nothing will ask for again
function op.forget()
  local gone = 0
  for i = 3, #ARGV do
    if redis.call('HEXISTS', HELD, ARGV[i]) == 0 then
      gone = gone + redis.call('HDEL', POSTED, ARGV[i])
    end
  end
  return { 'ok', gone }
end

function op.ping()
  return { 'ok' }
end

-- End the epoch: the balances differ from the ledger.
function op.doubt()
  LOST = true
  return { 'ok' }
end

-- A rebuild is begin, fill / known / reserve, commit under one token; everyone else is stale meanwhile, and a second
-- rebuild takes over from one that died. Where an epoch is in force, because nothing was lost or another gateway has
-- rebuilt, the caller joins it instead.
local rebuild = {}

-- What a gateway asks before it counts here. The balances of another format are of gateways that live if somebody looked
-- at them a moment ago.
function rebuild.starts()
  if eviction() then
    return { 'evicts', eviction() }
  end
  return format() ~= FORMAT and { 'format', format(), tonumber(IDLE_S) or 0 } or { 'ok' }
end

function rebuild.join()
  local current = epoch()
  return eviction() and { 'evicts', eviction() } or current and { 'ok', current } or { 'none' }
end

-- which server this is: its run id changes with every restart
function rebuild.server()
  return { 'ok', run_id() }
end

function rebuild.begin()
  if eviction() then
    return { 'evicts', eviction() }
  end
  local current = epoch()
  if current then
    return { 'ok', current }
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
    redis.call('HSET', POSTED, ARGV[i], total(ARGV[i + 1]))
  end
  return { 'ok' }
end

-- token, then holds with their charges: they are in the totals already, and must not be counted again
function rebuild.known()
  if not is_mine() then
    return { 'stale' }
  end
  each_hold(4, function(id, charged)
    redis.call('DEL', HOLD .. id)
    redis.call('HSET', HOLD .. id, 'gen', GEN, 'state', 'posted', 'granted', charged, 'charged', charged, 'n', 0)
    redis.call('EXPIRE', HOLD .. id, SETTLED_KEPT_S)
  end)
  return { 'ok' }
end

-- token, lease_ms, holds that the ledger has open
function rebuild.reserve()
  if not is_mine() then
    return { 'stale' }
  end
  each_hold(5, function(id, granted, scopes)
    if not fields(HOLD .. id, 'state')[1] then
      open_hold(HOLD .. id, id, granted, tonumber(ARGV[4]), scopes)
    end
  end)
  return { 'ok' }
end

-- token, wait_ms
function rebuild.commit()
  if not is_mine() then
    return { 'stale' }
  end
  local t = redis.call('TIME')
  local opened = t[1] .. string.format('%06d', t[2])
  redis.call('DEL', EPOCH)
  redis.call('HSET', EPOCH, 'epoch', opened, 'run', run_id(), 'wait', now_ms() + ARGV[4])
  redis.call('HSET', EPOCH, 'gen', GEN, 'sizes', sizes(), 'format', FORMAT)
  return { 'ok', opened }
end

if rebuild[OP] then
  return rebuild[OP]()
end
if epoch() ~= CALLER then
  return { 'stale' }
end
local reply = op[OP]()
if LOST then
  redis.call('DEL', EPOCH)
  return { 'stale' }
end
local now = sizes()
if now ~= stored[3] then
  redis.call('HSET', EPOCH, 'sizes', now)
end
return reply
