-- The operations table of the protocol, as the Redis server decides it.
--
-- Each operation is one script over a batch: KEYS are the names of the records, ARGV[1] is the
-- time (empty: the server's own), and ARGV[n + 1] is the request for KEYS[n]. All values
-- are read at once; each item is then decided and written separately.
--
-- Claims and commits arrive in large batches, and most items of a batch have the same terms (times
-- and forms). There ARGV[2] has all distinct terms, one after the other, ARGV[3] has a byte for
-- each name with the number of its terms (from 1), and ARGV[n + 3] has its own values.
--
-- A script is the part "every" followed by its own part; `scripts.py` joins them,
-- writes the requests and reads the answers. A record is kept as one string, its numbers with
-- the highest byte first:
--
--     1 byte    32 * fate (0: open) + 16 if the memo is in short form + attempts, if done (<= 15)
--     6 bytes   2^46 * form of the hash + 2^45 if there is a hard end + end (ms since 1970)
--     done:     8 bytes of the generation, [6 hard end], hash, memo
--     open:     6 keep until, 4 attempts, 16 token (zeros: none), 16 generation, hash, memo
--
-- The hash is nothing (form 0), 32 bytes (1), or its length in 2 bytes and itself (2).


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

-- The position after the hash field that begins at `at`.
local function past_hash(text, at, form)
  if form == 0 then return at end
  if form == 1 then return at + 32 end
  return at + 2 + read('>I2', text, at)
end

-- The requested memo, or the stored one; how: 0 as stored, 1 plain, 2 short.
local function memo_of(value, first, at, how, asked)
  if how == 0 then return floor(first / 16) % 2, sub(value, at) end
  return how - 1, asked
end

local found = redis.call('MGET', unpack(KEYS))
local answers = {now}


--# claim
--
-- Terms: 8 lease, 8 keep, 8 slide, 1 number of parts, 1 first byte of the value, 1 form of the
-- hash. Own: the value from its token on. One answer for all parts: 0 if all were started; the
-- values that are stored now, if all are held; else a letter, the number of the part that
-- decides, and its value.

local TERMS, HASH_AT = 27, 33
local terms, which = ARGV[2], ARGV[3]

local function terms_of(at)
  return read('>I8I8I8BBB', terms, (byte(which, at) - 1) * TERMS + 1)
end

-- Done, with a window that cannot slide, and the same content: nothing is written.
local function is_plain_duplicate(value, form, asked)
  local first, bits = read('>BI6', value)
  if first < 32 or now >= bits % HARD or bits % HASH >= HARD then return false end
  local stored = floor(bits / HASH)
  return form == 0 or stored == 0
    or form == 1 and stored == 1 and sub(value, 16, 47) == sub(asked, HASH_AT, HASH_AT + 31)
end

-- Nearly all have one part, and find no record or one that is done.
local others = {}
local names = #KEYS
local at, place = 1, 1
local term, count, form, head, keep_until
while at <= names do
  if byte(which, at) ~= term then
    term = byte(which, at)
    local lease, keep, _, parts, first, kind = terms_of(at)
    local ends = after(lease)
    count, form, keep_until = parts, kind, kept(ends, keep)
    head = pack('>BI6I6I4', first, form * HASH + ends, keep_until, 1)
  end
  place = place + 1
  local value, asked, answer = found[at], ARGV[at + 3], 0
  if count > 1 then
    others[#others + 1] = {at = at, count = count, place = place}
  elseif not value then
    put(KEYS[at], head .. asked, keep_until)
  elseif is_plain_duplicate(value, form, asked) then
    answer = 'D\1' .. value
  else
    others[#others + 1] = {at = at, count = 1, place = place}
  end
  answers[place] = answer
  at = at + count
end
if #others == 0 then return answers end

local function parts_of(at, count)
  local parts = {}
  for n = 0, count - 1 do
    local value, asked = found[at + n], ARGV[at + n + 3]
    local lease, keep, slide, _, first, form = terms_of(at + n)
    local over = past_hash(asked, HASH_AT, form)
    local part = {
      name = KEYS[at + n], asked = asked, slide = slide, lease = lease, keep = keep,
      first = first, form = form, field = sub(asked, HASH_AT, over - 1), value = value,
    }
    if value then
      local begins, bits = read('>BI6', value)
      local start = 50
      part.fate, part.ends = floor(begins / 32), bits % HARD
      part.stored_form, part.has_hard = floor(bits / HASH), bits % HASH >= HARD
      if part.fate == 0 then
        part.token = sub(value, 18, 33)
      else
        start = part.has_hard and 22 or 16
      end
      part.memo_at = past_hash(value, start, part.stored_form)
      part.stored_field = sub(value, start, part.memo_at - 1)
      part.is_same = form == 0 or part.stored_form == 0
        or form == part.stored_form and part.field == part.stored_field
      part.is_done = part.fate > 0 and now < part.ends
    end
    parts[n + 1] = part
  end
  return parts
end

-- Compare as bytes; Lua's own < uses the server's locale.
local function is_above(a, b)
  for at = 1, min(#a, #b) do
    local x, y = byte(a, at), byte(b, at)
    if x ~= y then return x > y end
  end
  return #a > #b
end

local function told(letter, number, part)
  return letter .. string.char(number) .. part.value
end

local function duplicate(parts, number)
  local part = parts[number]
  if part.slide > 0 and part.has_hard then
    local pushed = min(now + part.slide, (read('>I6', part.value, 16)))
    if pushed > part.ends then
      local bits = part.stored_form * HASH + HARD + pushed
      part.value = pack('>BI6', byte(part.value), bits) .. sub(part.value, 8)
      put(part.name, part.value, pushed)
    end
  end
  return told('D', number, part)
end

-- The reasons to refuse the claim, in the order of precedence.
local function refusal(parts, token)
  local last = parts[#parts]
  if last.is_done and last.is_same then return duplicate(parts, #parts) end
  local holder
  for number, part in ipairs(parts) do
    part.is_ours = part.fate == 0 and token ~= NO_TOKEN and part.token == token
    if part.fate == 0 and now < part.ends and not part.is_ours then
      local most = holder and parts[holder]
      if not most or part.ends > most.ends
          or part.ends == most.ends and is_above(part.name, most.name) then
        holder = number
      end
    end
  end
  if holder then return told('B', holder, parts[holder]) end
  for number = #parts, 1, -1 do
    if parts[number].is_done and not parts[number].is_same then
      return told('M', number, parts[number])
    end
  end
  for number, part in ipairs(parts) do
    if part.is_done then return duplicate(parts, number) end
  end
end

local function take(part, token)
  local ends = after(part.lease)
  local keep_until = kept(ends, part.keep)
  if part.fate == 0 and part.is_same then
    local form, field = part.stored_form, part.stored_field
    if form == 0 then form, field = part.form, part.field end
    local attempts = min(read('>I4', part.value, 14) + 1, 2 ^ 32 - 1)
    part.value = pack('>BI6I6I4', byte(part.value), form * HASH + ends, keep_until, attempts)
      .. token .. sub(part.value, 34, 49) .. field .. sub(part.value, part.memo_at)
  else
    part.is_started = true
    part.value = pack('>BI6I6I4', part.first, part.form * HASH + ends, keep_until, 1)
      .. part.asked
  end
  put(part.name, part.value, keep_until)
end

local function decide(at, count)
  local parts = parts_of(at, count)
  local token = sub(ARGV[at + 3], 1, 16)
  local refused = refusal(parts, token)
  if refused then return refused end
  local values, started = {}, 0
  for number, part in ipairs(parts) do
    if not part.is_ours then take(part, token) end
    if part.is_started then started = started + 1 end
    values[number] = part.value
  end
  return started == count and 0 or values
end

for _, other in ipairs(others) do
  answers[other.place] = decide(other.at, other.count)
end
return answers


--# commit
--
-- Terms: 8 window, 8 hard (0: none), 1 fate, 1 how the memo is given. Own: 16 generation, memo.
-- Answers: 0 fenced, 1 committed, 2 already.

local TERMS = 18
local terms, which = ARGV[2], ARGV[3]

local term, ends, hard, fate, how, heads
for at, name in ipairs(KEYS) do
  local value, asked, answer = found[at], ARGV[at + 3], 0
  if value and byte(value) >= 32 then
    if sub(value, 8, 15) == sub(asked, 1, 8) then
      -- Written again as it is: WAIT counts the replicas that have what this connection wrote.
      local _, bits = read('>BI6', value)
      put(name, value, bits % HARD)
      answer = 2
    end
  elseif value and find(value, sub(asked, 1, 16), 34, true) == 34 then
    if byte(which, at) ~= term then
      term = byte(which, at)
      local window
      window, hard, fate, how = read('>I8I8BB', terms, (term - 1) * TERMS + 1)
      ends = after(window)
      hard = hard > 0 and pack('>I6', after(hard)) or ''
      heads = {}
    end
    local first, second = byte(value, 1, 2)
    local form, attempts = floor(second / 64), 15
    local high, higher, low, lowest = byte(value, 14, 17)
    if high + higher + low == 0 then attempts = min(lowest, 15) end
    local short, rest = floor(first / 16) % 2, ''
    if how == 0 then
      rest = sub(value, 50)
    else
      short, rest = how - 1, sub(value, 50, past_hash(value, 50, form) - 1) .. sub(asked, 17)
    end
    local start = 32 * fate + 16 * short + attempts
    local head = heads[4 * start + form]
    if not head then
      head = pack('>BI6', start, form * HASH + (hard == '' and 0 or HARD) + ends)
      heads[4 * start + form] = head
    end
    put(name, head .. sub(value, 34, 41) .. hard .. rest, ends)
    answer = 1
  end
  answers[at + 1] = answer
end
return answers


--# release
--
-- Request: 8 delay, 8 keep, 1 unsent, 1 how the memo is given, 16 token, memo.
-- Answers: 0 fenced, 1 released.

for at, name in ipairs(KEYS) do
  local value, asked, answer = found[at], ARGV[at + 1], 0
  local delay, keep, unsent, how = read('>I8I8BB', asked)
  local token = sub(asked, 19, 34)
  if value and byte(value) < 32 and token ~= NO_TOKEN and sub(value, 18, 33) == token then
    local first, bits, _, attempts = read('>BI6I6I4', value)
    local form = floor(bits / HASH)
    local over = past_hash(value, 50, form)
    local short, memo = memo_of(value, first, over, how, sub(asked, 35))
    local ends = after(delay)
    local keep_until = kept(ends, keep)
    put(name, pack('>BI6I6I4', 16 * short, form * HASH + ends, keep_until,
      math.max(attempts - unsent, 0))
      .. NO_TOKEN .. sub(value, 34, over - 1) .. memo, keep_until)
    answer = 1
  end
  answers[at + 1] = answer
end
return answers


--# extend
--
-- Request: 8 lease, 16 token. Answers: 0 fenced, 1 extended.

for at, name in ipairs(KEYS) do
  local value, asked, answer = found[at], ARGV[at + 1], 0
  local token = sub(asked, 9, 24)
  if value and byte(value) < 32 and token ~= NO_TOKEN and sub(value, 18, 33) == token then
    local first, bits, keep_until = read('>BI6I6', value)
    local ends = after((read('>I8', asked)))
    keep_until = keep_until + math.max(ends - bits % HARD, 0)
    put(name, pack('>BI6I6', first, floor(bits / HASH) * HASH + ends, keep_until)
      .. sub(value, 14), keep_until)
    answer = 1
  end
  answers[at + 1] = answer
end
return answers


--# remember
--
-- Request: 8 window, 1 fate, 1 whether the memo is in short form, 1 form of the hash,
-- 8 generation, hash, memo. Answers: 0 known, 1 remembered.

for at, name in ipairs(KEYS) do
  local value, asked = found[at], ARGV[at + 1]
  local first, bits
  if value then first, bits = read('>BI6', value) end
  if value and now < bits % HARD then
    answers[at + 1] = 0
  else
    local window, fate, short, form = read('>I8BBB', asked)
    local ends, attempts, generation = after(window), 0, sub(asked, 12, 19)
    if value and first < 32 then
      attempts, generation = min(read('>I4', value, 14), 15), sub(value, 34, 41)
    end
    put(name, pack('>BI6', 32 * fate + 16 * short + attempts, form * HASH + ends)
      .. generation .. sub(asked, 20), ends)
    answers[at + 1] = 1
  end
end
return answers


--# load
--
-- Request: 8 keep until, value. Answers: 0 known, 1 loaded.

for at, name in ipairs(KEYS) do
  local value, asked = found[at], ARGV[at + 1]
  if value and (byte(value) < 32 or now < read('>I6', value, 2) % HARD) then
    answers[at + 1] = 0
  else
    put(name, sub(asked, 9), (read('>I8', asked)))
    answers[at + 1] = 1
  end
end
return answers


--# forget
--
-- No request. Answers: 0 refused, 1 forgotten.

for at, name in ipairs(KEYS) do
  local value = found[at]
  if not value or byte(value) < 32 and now < read('>I6', value, 2) % HARD then
    answers[at + 1] = 0
  else
    call('DEL', name)
    answers[at + 1] = 1
  end
end
return answers


--# look
--
-- No request. Answers: the time, and the values.

for at, value in ipairs(found) do
  answers[at + 1] = value
end
return answers


--# swap
--
-- Request: 1 what to write (0 nothing: it is removed, 1 a value, 2 a value that starts now),
-- 8 keep until, 8 lease, 8 keep, 4 length of the expected value, that value (empty: none), the value.
-- Answers: the time, and 0 if another value is stored, 1 if it was written.

for at, name in ipairs(KEYS) do
  local asked = ARGV[at + 1]
  local what, keep_until, lease, keep, length = read('>BI8I8I8I4', asked)
  local value = sub(asked, 30 + length)
  if (found[at] or '') ~= sub(asked, 30, 29 + length) then
    answers[at + 1] = 0
  else
    if what == 0 then
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
    answers[at + 1] = 1
  end
end
return answers
