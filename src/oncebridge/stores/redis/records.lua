-- The operations table of the protocol, as the Redis server decides it.
--
-- Each operation is one script over a batch: KEYS are the names of the records, ARGV[1] is the
-- time (empty: the server's own). All values are read at once; each item is then decided and
-- written separately. The answer has the time, the number of names, and then, only for items that
-- did not go as usual, their position and what there is to tell.
--
-- The other arguments are columns, with one value for all items or one for each: a number has 8
-- bytes, a token or generation 16. Texts take two arguments: their lengths (4 bytes each), and all
-- of them joined. Memos take four: their forms (a byte each: 0 plain, 1 short, 2 as stored), the
-- first 16 bytes of each that is short, and the rest as texts.
--
-- A script is the part "every" followed by its own part; `scripts.py` joins them,
-- writes the arguments and reads the answers. A record is kept as one string, its numbers with
-- the highest byte first:
--
--     1 byte    32 * fate (0: open) + 16 if the memo is in short form + attempts, if done (<= 15)
--     6 bytes   2^46 * form of the hash + 2^45 if there is a hard end + end (ms since 1970)
--     done:     8 bytes of the generation, [6 hard end], hash, memo
--     open:     6 keep until, 4 attempts, 16 token (zeros: none), 16 generation, hash, memo
--
-- The hash is nothing (form 0), 32 bytes (1), or its length in 2 bytes and itself (2). Whoever
-- changes this raises `FORM` in `scripts.py`.


--# every

local sub, byte, find = string.sub, string.byte, string.find
local floor, min = math.floor, math.min
local pack, read, call = struct.pack, struct.unpack, redis.call
local HARD, HASH = 2 ^ 45, 2 ^ 46
local NO_TOKEN = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

local now = tonumber(ARGV[1])
local expires = not now  -- on a test's clock, nothing may go by the server's
if expires then
  if redis.replicate_commands then redis.replicate_commands() end  -- 6.2 lets one turn that off
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end

local function after(ms)
  return min(now + ms, HARD - 1)  -- the year 3084
end

local function kept(ends, ms)
  return min(ends + ms, 2 ^ 48 - 1)
end

local latest, latest_text  -- a time takes long to write, and is nearly always the same
local function put(name, value, keep_until)
  if not expires then
    call('SET', name, value)
  elseif keep_until > now then
    if keep_until ~= latest then
      latest, latest_text = keep_until, string.format('%.0f', keep_until)
    end
    call('SET', name, value, 'PXAT', latest_text)
  else
    call('DEL', name)
  end
end

local function number_of(column, at)
  return (read('>I8', column, #column == 8 and 1 or 8 * at - 7))
end

local function token_of(column, at)
  if #column == 16 then return column end
  return sub(column, 16 * at - 15, 16 * at)
end

-- A function that returns the next text at each call.
local function texts(first)
  local lengths, joined = ARGV[first], ARGV[first + 1]
  local all = #lengths == 4 and read('>I4', lengths)
  local at, place = 1, 1
  return function()
    local begins = place
    place = begins + (all or (read('>I4', lengths, at)))
    at = at + 4
    return sub(joined, begins, place - 1)
  end
end

-- A function that returns the form and the memo of the next item; nothing: as stored.
local function memos(first)
  local forms, ids, next_rest = ARGV[first], ARGV[first + 1], texts(first + 2)
  if forms == '\2' then return function() end end
  local at, id = 0, 1
  return function()
    at = at + 1
    local form, rest = byte(forms, #forms == 1 and 1 or at), next_rest()
    if form == 0 then return 0, rest end
    if form == 2 then return end
    id = id + 16
    return 16, sub(ids, id - 16, id - 1) .. rest
  end
end

-- The form of a hash, and the field that holds it.
local function hash_field(hash)
  local size = #hash
  if size == 0 then return 0, '' end
  if size == 32 then return 1, hash end
  return 2, pack('>I2', size) .. hash
end

-- The position after the hash field that begins at `at`.
local function past_hash(text, at, form)
  if form == 0 then return at end
  if form == 1 then return at + 32 end
  return at + 2 + read('>I2', text, at)
end

local found = call('MGET', unpack(KEYS))
local answers = {now, #KEYS}
local function tell(at, told)
  local count = #answers
  answers[count + 1], answers[count + 2] = at, told
end


--# claim
--
-- For each event: 2 lease, 3 keep, 4 token, 5 generation, 6 to 9 memo. For each name: 10 and 11
-- hash, 12 slide. 13 has the number of names of each event in a byte; empty if all have one. Usually
-- all records of an event were started. Otherwise: the values that are stored now, if all are held;
-- or a letter, the number of the part that decides, and its value (of a busy one, what is left).

local leases, keeps, tokens, generations = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local slides, sizes = ARGV[12], ARGV[13]
local next_memo, next_hash = memos(6), texts(10)
local is_uniform = #leases + #keeps + #tokens + #generations == 48
local token, generation, ends, keep_until, heads, short, memo

local function started(form, field)
  local head = heads[short + form]
  if not head then
    head = pack('>BI6I6I4', short, form * HASH + ends, keep_until, 1) .. token .. generation
    heads[short + form] = head
  end
  return head .. field .. memo
end

-- Done, with a window that cannot slide, and the same content: nothing is written.
local function is_plain_duplicate(value, form, field)
  local first, bits = read('>BI6', value)
  if first < 32 or now >= bits % HARD or bits % HASH >= HARD then return false end
  local stored = floor(bits / HASH)
  return form == 0 or stored == 0
    or form == 1 and stored == 1 and sub(value, 16, 47) == field
end

local function part_of(at, form, field)
  local value = found[at]
  local part = {at = at, name = KEYS[at], form = form, field = field, value = value}
  if value then
    local begins, bits = read('>BI6', value)
    local start = 50
    part.fate, part.ends = floor(begins / 32), bits % HARD
    part.stored_form, part.has_hard = floor(bits / HASH), bits % HASH >= HARD
    if part.fate == 0 then
      part.is_ours = token ~= NO_TOKEN and sub(value, 18, 33) == token
    else
      start = part.has_hard and 22 or 16
    end
    part.memo_at = past_hash(value, start, part.stored_form)
    part.stored_field = sub(value, start, part.memo_at - 1)
    part.is_same = form == 0 or part.stored_form == 0
      or form == part.stored_form and field == part.stored_field
    part.is_done = part.fate > 0 and now < part.ends
  end
  return part
end

-- Compare as bytes; Lua's own < uses the server's locale.
local function is_above(a, b)
  for at = 1, min(#a, #b) do
    local x, y = byte(a, at), byte(b, at)
    if x ~= y then return x > y end
  end
  return #a > #b
end

local function refused(letter, number, text)
  return letter .. string.char(number) .. text
end

local function duplicate(part, number)
  if part.has_hard then
    local slide = number_of(slides, part.at)
    local pushed = min(now + slide, (read('>I6', part.value, 16)))
    if slide > 0 and pushed > part.ends then
      local bits = part.stored_form * HASH + HARD + pushed
      part.value = pack('>BI6', byte(part.value), bits) .. sub(part.value, 8)
      put(part.name, part.value, pushed)
    end
  end
  return refused('D', number, part.value)
end

-- The reasons to refuse the claim, in the order of precedence.
local function refusal(parts)
  local last = parts[#parts]
  if last.is_done and last.is_same then return duplicate(last, #parts) end
  local holder
  for number, part in ipairs(parts) do
    if part.fate == 0 and now < part.ends and not part.is_ours then
      local most = holder and parts[holder]
      if not most or part.ends > most.ends
          or part.ends == most.ends and is_above(part.name, most.name) then
        holder = number
      end
    end
  end
  if holder then return refused('B', holder, pack('>I8', parts[holder].ends - now)) end
  for number = #parts, 1, -1 do
    local part = parts[number]
    if part.is_done and not part.is_same then return refused('M', number, part.value) end
  end
  for number, part in ipairs(parts) do
    if part.is_done then return duplicate(part, number) end
  end
end

-- Claim a part, and return whether it is a first attempt.
local function take(part)
  local is_retry = part.fate == 0 and part.is_same
  if is_retry then
    local form, field = part.stored_form, part.stored_field
    if form == 0 then form, field = part.form, part.field end
    local attempts = min(read('>I4', part.value, 14) + 1, 2 ^ 32 - 1)
    part.value = pack('>BI6I6I4', byte(part.value), form * HASH + ends, keep_until, attempts)
      .. token .. sub(part.value, 34, 49) .. field .. sub(part.value, part.memo_at)
  else
    part.value = started(part.form, part.field)
  end
  put(part.name, part.value, keep_until)
  return not is_retry
end

local function decide(parts)
  local told = refusal(parts)
  if told then return told end
  local values, count = {}, 0
  for number, part in ipairs(parts) do
    if not part.is_ours and take(part) then count = count + 1 end
    values[number] = part.value
  end
  return count < #parts and values
end

-- Nearly all have one part, and find no record or one that is done.
local at, event = 1, 1
while at <= #KEYS do
  if event == 1 or not is_uniform then
    token, generation = token_of(tokens, event), token_of(generations, event)
    ends = after(number_of(leases, event))
    keep_until = kept(ends, number_of(keeps, event))
    heads = {}
  end
  short, memo = next_memo()
  local count = sizes == '' and 1 or byte(sizes, event)
  local value, form, field = found[at], hash_field(next_hash())
  if count == 1 and not value then
    put(KEYS[at], started(form, field), keep_until)
  elseif count == 1 and is_plain_duplicate(value, form, field) then
    tell(event, 'D\1' .. value)
  else
    local parts = {part_of(at, form, field)}
    for number = 2, count do
      parts[number] = part_of(at + number - 1, hash_field(next_hash()))
    end
    local told = decide(parts)
    if told then tell(event, told) end
  end
  at, event = at + count, event + 1
end
return answers


--# commit
--
-- 2 generation, 3 window, 4 hard end (0: none), 5 fate, 6 to 9 memo. Usually it is committed;
-- otherwise 0 fenced, 2 already.

local generations, windows, hards, fates = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local next_memo = memos(6)
local is_uniform = #generations + #windows + #hards + #fates == 40
local generation, ends, hard, fate, heads
for at, name in ipairs(KEYS) do
  if at == 1 or not is_uniform then
    generation, fate = token_of(generations, at), number_of(fates, at)
    ends = after(number_of(windows, at))
    hard = number_of(hards, at)
    hard = hard > 0 and pack('>I6', after(hard)) or ''
    heads = {}
  end
  local value = found[at]
  local short, memo = next_memo()
  if value and byte(value) >= 32 then
    local is_same = sub(value, 8, 15) == sub(generation, 1, 8)
    if is_same then
      -- Written again as it is: WAIT counts the replicas that have what this connection wrote.
      local _, bits = read('>BI6', value)
      put(name, value, bits % HARD)
    end
    tell(at, is_same and 2 or 0)
  elseif value and find(value, generation, 34, true) == 34 then
    local first, second = byte(value, 1, 2)
    local form, attempts = floor(second / 64), 15
    local high, higher, low, lowest = byte(value, 14, 17)
    if high + higher + low == 0 then attempts = min(lowest, 15) end
    local rest
    if memo then
      rest = sub(value, 50, past_hash(value, 50, form) - 1) .. memo
    else
      short, rest = first, sub(value, 50)
    end
    local start = 32 * fate + short + attempts
    local head = heads[4 * start + form]
    if not head then
      head = pack('>BI6', start, form * HASH + (hard == '' and 0 or HARD) + ends)
        .. sub(generation, 1, 8) .. hard
      heads[4 * start + form] = head
    end
    put(name, head .. rest, ends)
  else
    tell(at, 0)
  end
end
return answers


--# release
--
-- 2 token, 3 delay, 4 keep, 5 unsent, 6 to 9 memo. Usually it is released; otherwise 0 fenced.

local next_memo = memos(6)
for at, name in ipairs(KEYS) do
  local value, token, short, memo = found[at], token_of(ARGV[2], at), next_memo()
  if value and byte(value) < 32 and token ~= NO_TOKEN and sub(value, 18, 33) == token then
    local first, bits, _, attempts = read('>BI6I6I4', value)
    local form = floor(bits / HASH)
    local over = past_hash(value, 50, form)
    if not memo then short, memo = first, sub(value, over) end
    local ends = after(number_of(ARGV[3], at))
    local keep_until = kept(ends, number_of(ARGV[4], at))
    attempts = math.max(attempts - number_of(ARGV[5], at), 0)
    put(name, pack('>BI6I6I4', short, form * HASH + ends, keep_until, attempts)
      .. NO_TOKEN .. sub(value, 34, over - 1) .. memo, keep_until)
  else
    tell(at, 0)
  end
end
return answers


--# extend
--
-- 2 token, 3 lease. Usually it is extended; otherwise 0 fenced.

for at, name in ipairs(KEYS) do
  local value, token = found[at], token_of(ARGV[2], at)
  if value and byte(value) < 32 and token ~= NO_TOKEN and sub(value, 18, 33) == token then
    local first, bits, keep_until = read('>BI6I6', value)
    local ends = after(number_of(ARGV[3], at))
    keep_until = keep_until + math.max(ends - bits % HARD, 0)
    put(name, pack('>BI6I6', first, floor(bits / HASH) * HASH + ends, keep_until)
      .. sub(value, 14), keep_until)
  else
    tell(at, 0)
  end
end
return answers


--# remember
--
-- 2 generation, 3 window, 4 fate, 5 to 8 memo, 9 and 10 hash. Usually it is remembered; otherwise
-- 0 known.

local next_memo, next_hash = memos(5), texts(9)
for at, name in ipairs(KEYS) do
  local value, short, memo = found[at], next_memo()
  local form, field = hash_field(next_hash())
  local first, bits
  if value then first, bits = read('>BI6', value) end
  if value and now < bits % HARD then
    tell(at, 0)
  else
    local ends, attempts = after(number_of(ARGV[3], at)), 0
    local generation = sub(token_of(ARGV[2], at), 1, 8)
    if value and first < 32 then
      attempts, generation = min(read('>I4', value, 14), 15), sub(value, 34, 41)
    end
    put(name, pack('>BI6', 32 * number_of(ARGV[4], at) + short + attempts, form * HASH + ends)
      .. generation .. field .. memo, ends)
  end
end
return answers


--# load
--
-- For each name: 8 keep until, value. Usually it is loaded; otherwise 0 known.

for at, name in ipairs(KEYS) do
  local value, asked = found[at], ARGV[at + 1]
  if value and (byte(value) < 32 or now < read('>I6', value, 2) % HARD) then
    tell(at, 0)
  else
    put(name, sub(asked, 9), (read('>I8', asked)))
  end
end
return answers


--# forget
--
-- Usually it is forgotten; otherwise 0 refused.

for at, name in ipairs(KEYS) do
  local value = found[at]
  if not value or byte(value) < 32 and now < read('>I6', value, 2) % HARD then
    tell(at, 0)
  else
    call('DEL', name)
  end
end
return answers


--# look
--
-- Usually there is no record; otherwise its value.

for at, value in ipairs(found) do
  if value then tell(at, value) end
end
return answers


--# form
--
-- 2 the form of our records, to be kept if there is none; otherwise the one that is kept.

if found[1] then tell(1, found[1]) else call('SET', KEYS[1], ARGV[2]) end
return answers


--# swap
--
-- For each name: 1 what to write (0 nothing: it is removed, 1 a value, 2 a value that starts now),
-- 8 keep until, 8 lease, 8 keep, 4 length of the expected value, that value (empty: none), the value.
-- Usually it is written; otherwise 0: another value is stored.

for at, name in ipairs(KEYS) do
  local asked = ARGV[at + 1]
  local what, keep_until, lease, keep, length = read('>BI8I8I8I4', asked)
  local value = sub(asked, 30 + length)
  if (found[at] or '') ~= sub(asked, 30, 29 + length) then
    tell(at, 0)
  elseif what == 0 then
    call('DEL', name)
  else
    if what == 2 then
      local first, bits = read('>BI6', value)
      local ends = after(lease)
      keep_until = kept(ends, keep)
      value = pack('>BI6I6', first, floor(bits / HASH) * HASH + ends, keep_until)
        .. sub(value, 14)
    end
    put(name, value, keep_until)
  end
end
return answers
