-- The operations table of the protocol, as the Redis server decides it.
--
-- Each operation is one script over a batch: KEYS are the names of the records, ARGV[1] is the
-- time (empty: the server's own). All values are read at once; each item is then decided and
-- written separately. The answer is the time, the number of names, and then the position and the
-- outcome of each item whose outcome is not the usual one.
--
-- ARGV[2] has the terms, values of fixed size: once if all items have the same, otherwise those of
-- each item, one after the other. The arguments from ARGV[3] on are the own values of each item. A
-- memo is given in form 0 (plain) or 1 (short); form 2 is none: it stays as it is stored.
--
-- A script is the part "every" followed by its own part; `scripts.py` joins them, writes the
-- arguments and reads the answers. Functions that are rarely needed are defined late: to define one
-- takes as long as to decide on an item. A record is kept as one string, its numbers with
-- the highest byte first:
--
--     1 byte    32 * fate (0: open) + 16 if the memo is in short form + attempts, if done (<= 15)
--     6 bytes   2^46 * form of the hash + 2^45 if there is a hard end + end (ms since 1970)
--     done:     8 bytes of the generation, [6 hard end], hash, memo
--     open:     6 keep until, 4 attempts, 16 token (zeros: none), 16 generation, hash, memo
--
-- The hash is nothing (form 0), 32 bytes (1), or its length in 2 bytes and itself (2). A change of
-- this raises `FORM` in `scripts.py`.


--# every

local sub, byte, floor, min = string.sub, string.byte, math.floor, math.min
local pack, read, call = struct.pack, struct.unpack, redis.call
local HARD, HASH = 2 ^ 45, 2 ^ 46
local LATEST, LATEST_KEEP = HARD - 1, 2 ^ 48 - 1  -- the years 3084 and 10889
local NO_TOKEN = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

local now = tonumber(ARGV[1])
local expires = not now  -- on a test's clock, nothing may go by the server's
if expires then
  if redis.replicate_commands then redis.replicate_commands() end  -- 6.2 lets one turn that off
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
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

-- The position after the hash field that begins at `at`.
local function past_hash(text, at, form)
  if form == 0 then return at end
  if form == 1 then return at + 32 end
  return at + 2 + read('>I2', text, at)
end

local terms, found = ARGV[2], call('MGET', unpack(KEYS))
local answers = {now, #KEYS}
local function report(at, outcome)
  local count = #answers
  answers[count + 1], answers[count + 2] = at, outcome
end


--# claim
--
-- Terms of each name: 8 lease, 8 keep, 16 token, 16 generation, 1 number of names of the event, 1 form
-- of the memo, 8 slide, 1 form of the hash. Own: hash, memo. Usually all records of an event were
-- started. Otherwise: the values that are stored now, if all are held; or a letter, the number of the
-- name that decides, and its value (B: how long it is held). The positions are those of events.

local token, count, slide, form, ends, keep_until, head

local function read_terms(at)
  local lease, keep, generation, short
  lease, keep, token, generation, count, short, slide, form
    = read('>I8I8c16c16BBI8B', terms, #terms == 59 and 1 or 59 * at - 58)
  ends = min(now + lease, LATEST)
  keep_until = min(ends + keep, LATEST_KEEP)
  head = pack('>BI6I6I4', 16 * short, form * HASH + ends, keep_until, 1) .. token .. generation
end

-- Nearly all have one part, and find no record, or one that is done with the same content and a
-- window that does not slide.
local others
local at, event = 1, 1
while at <= #KEYS do
  if at == 1 or #terms > 59 then read_terms(at) end
  local value, is_usual = found[at], count == 1
  if is_usual and not value then
    put(KEYS[at], head .. ARGV[at + 2], keep_until)
  elseif is_usual then
    local first, bits = read('>BI6', value)
    is_usual = first >= 32 and now < bits % HARD and bits % HASH < HARD
    if is_usual and form > 0 and bits >= HASH then
      is_usual = form == 1 and bits < 2 * HASH and sub(value, 16, 47) == sub(ARGV[at + 2], 1, 32)
    end
    if is_usual then report(event, 'D\1' .. value) end
  end
  if not is_usual then others = {at = at, event = event, next = others} end
  at, event = at + count, event + 1
end
if not others then return answers end

local function part_of(at)
  read_terms(at)
  local value, own = found[at], ARGV[at + 2]
  local part = {
    name = KEYS[at], value = value, own = own, slide = slide, form = form, head = head,
    field = sub(own, 1, past_hash(own, 1, form) - 1),
  }
  if value then
    local first, bits = read('>BI6', value)
    local start = 50
    part.fate, part.ends = floor(first / 32), bits % HARD
    part.stored_form, part.has_hard = floor(bits / HASH), bits % HASH >= HARD
    if part.fate == 0 then
      part.is_ours = token ~= NO_TOKEN and sub(value, 18, 33) == token
    else
      start = part.has_hard and 22 or 16
    end
    part.memo_at = past_hash(value, start, part.stored_form)
    part.stored_field = sub(value, start, part.memo_at - 1)
    part.is_same = form == 0 or part.stored_form == 0
      or form == part.stored_form and part.field == part.stored_field
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
    local pushed = min(now + part.slide, (read('>I6', part.value, 16)))
    if part.slide > 0 and pushed > part.ends then
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

-- Claim a part, and return whether that started it.
local function take(part)
  local value, is_started = part.value, part.fate ~= 0 or not part.is_same
  if is_started then
    part.value = part.head .. part.own
  else
    local form, field = part.stored_form, part.stored_field
    if form == 0 then form, field = part.form, part.field end
    local attempts = min(read('>I4', value, 14) + 1, 2 ^ 32 - 1)
    part.value = pack('>BI6I6I4', byte(value), form * HASH + ends, keep_until, attempts)
      .. token .. sub(value, 34, 49) .. field .. sub(value, part.memo_at)
  end
  put(part.name, part.value, keep_until)
  return is_started
end

local function decide(at)
  local parts = {part_of(at)}
  for number = 2, count do parts[number] = part_of(at + number - 1) end
  local refused = refusal(parts)
  if refused then return refused end
  local values, started = {}, 0
  for number, part in ipairs(parts) do
    if not part.is_ours and take(part) then started = started + 1 end
    values[number] = part.value
  end
  return started < #parts and values
end

while others do
  local answer = decide(others.at)
  if answer then report(others.event, answer) end
  others = others.next
end
return answers


--# commit
--
-- Terms: 16 generation, 8 window, 8 hard end (0: none), 1 fate, 1 form of the memo. Own: memo. Usually
-- it is committed; otherwise 0 fenced, 2 already.

local generation, known, ends, hard, fate, how, heads
for at, name in ipairs(KEYS) do
  if at == 1 or #terms > 34 then
    local window, hard_ms
    generation, window, hard_ms, fate, how
      = read('>c16I8I8BB', terms, #terms == 34 and 1 or 34 * at - 33)
    known, ends, heads = sub(generation, 1, 8), min(now + window, LATEST), {}
    hard = hard_ms > 0 and pack('>I6', min(now + hard_ms, LATEST)) or ''
  end
  local value, answer = found[at], 0
  local first, second = byte(value or '', 1, 2)
  if value and first >= 32 then
    if sub(value, 8, 15) == known then
      -- Written again as it is: WAIT counts the replicas that have what this connection wrote.
      local _, bits = read('>BI6', value)
      put(name, value, bits % HARD)
      answer = 2
    end
  elseif value and sub(value, 34, 49) == generation then
    local form, attempts = floor(second / 64), 15
    local high, higher, low, lowest = byte(value, 14, 17)
    if high + higher + low == 0 then attempts = min(lowest, 15) end
    local short, rest = first, ''
    if how == 2 then
      rest = sub(value, 50)
    else
      short, rest = 16 * how, sub(value, 50, past_hash(value, 50, form) - 1) .. ARGV[at + 2]
    end
    local start = 32 * fate + short + attempts
    local head = heads[4 * start + form]
    if not head then
      head = pack('>BI6', start, form * HASH + (hard == '' and 0 or HARD) + ends) .. known .. hard
      heads[4 * start + form] = head
    end
    put(name, head .. rest, ends)
    answer = 1
  end
  if answer ~= 1 then report(at, answer) end
end
return answers


--# release
--
-- Terms: 16 token, 8 delay, 8 keep, 1 unsent, 1 form of the memo. Own: memo. Usually it is released;
-- otherwise 0 fenced.

for at, name in ipairs(KEYS) do
  local token, delay, keep, unsent, how
    = read('>c16I8I8BB', terms, #terms == 34 and 1 or 34 * at - 33)
  local value = found[at]
  if value and byte(value) < 32 and token ~= NO_TOKEN and sub(value, 18, 33) == token then
    local first, bits, _, attempts = read('>BI6I6I4', value)
    local form = floor(bits / HASH)
    local over = past_hash(value, 50, form)
    local short, memo = 16 * how, ARGV[at + 2]
    if how == 2 then short, memo = first, sub(value, over) end
    local ends = min(now + delay, LATEST)
    local keep_until = min(ends + keep, LATEST_KEEP)
    put(name, pack('>BI6I6I4', short, form * HASH + ends, keep_until,
      math.max(attempts - unsent, 0))
      .. NO_TOKEN .. sub(value, 34, over - 1) .. memo, keep_until)
  else
    report(at, 0)
  end
end
return answers


--# extend
--
-- Terms: 16 token, 8 lease. Usually it is extended; otherwise 0 fenced.

for at, name in ipairs(KEYS) do
  local token, lease = read('>c16I8', terms, #terms == 24 and 1 or 24 * at - 23)
  local value = found[at]
  if value and byte(value) < 32 and token ~= NO_TOKEN and sub(value, 18, 33) == token then
    local first, bits, keep_until = read('>BI6I6', value)
    local ends = min(now + lease, LATEST)
    keep_until = keep_until + math.max(ends - bits % HARD, 0)
    put(name, pack('>BI6I6', first, floor(bits / HASH) * HASH + ends, keep_until)
      .. sub(value, 14), keep_until)
  else
    report(at, 0)
  end
end
return answers


--# remember
--
-- Terms: 8 generation, 8 window, 1 fate, 1 form of the memo, 1 form of the hash. Own: hash, memo.
-- Usually it is remembered; otherwise 0 known.

for at, name in ipairs(KEYS) do
  local value, first, bits = found[at], nil, nil
  if value then first, bits = read('>BI6', value) end
  if value and now < bits % HARD then
    report(at, 0)
  else
    local generation, window, fate, short, form
      = read('>c8I8BBB', terms, #terms == 19 and 1 or 19 * at - 18)
    local ends, attempts = min(now + window, LATEST), 0
    if value and first < 32 then
      attempts, generation = min(read('>I4', value, 14), 15), sub(value, 34, 41)
    end
    put(name, pack('>BI6', 32 * fate + 16 * short + attempts, form * HASH + ends)
      .. generation .. ARGV[at + 2], ends)
  end
end
return answers


--# load
--
-- Own: 8 keep until, value. Usually it is loaded; otherwise 0 known.

for at, name in ipairs(KEYS) do
  local value, asked = found[at], ARGV[at + 2]
  if value and (byte(value) < 32 or now < read('>I6', value, 2) % HARD) then
    report(at, 0)
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
    report(at, 0)
  else
    call('DEL', name)
  end
end
return answers


--# look
--
-- Usually there is no record; otherwise its value.

for at, value in ipairs(found) do
  if value then report(at, value) end
end
return answers


--# form
--
-- Terms: the form of our records. Usually it is noted; otherwise the one that is noted already.

if found[1] then report(1, found[1]) else call('SET', KEYS[1], terms) end
return answers


--# swap
--
-- Own: 1 what to write (0 nothing: it is removed, 1 a value, 2 a value that starts now),
-- 8 keep until, 8 lease, 8 keep, 4 length of the expected value, that value (empty: none), the value.
-- Usually it is written; otherwise 0: another value is stored.

for at, name in ipairs(KEYS) do
  local asked = ARGV[at + 2]
  local what, keep_until, lease, keep, length = read('>BI8I8I8I4', asked)
  local value = sub(asked, 30 + length)
  if (found[at] or '') ~= sub(asked, 30, 29 + length) then
    report(at, 0)
  elseif what == 0 then
    call('DEL', name)
  else
    if what == 2 then
      local first, bits = read('>BI6', value)
      local ends = min(now + lease, LATEST)
      keep_until = min(ends + keep, LATEST_KEEP)
      value = pack('>BI6I6', first, floor(bits / HASH) * HASH + ends, keep_until)
        .. sub(value, 14)
    end
    put(name, value, keep_until)
  end
end
return answers
