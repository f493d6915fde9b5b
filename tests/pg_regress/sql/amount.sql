-- Amounts and balances over the whole range of bigint.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;

CREATE FUNCTION refusal(call text, OUT code text, OUT message text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT;
END $$;

INSERT INTO account VALUES
    (1, 9223372036854775807), (2, 9223372036854775807), (3, 0), (4, 1), (0, 10), (-1, 10),
    (9223372036854775807, 10), (-9223372036854775808, 10);

-- The largest amount empties the fullest account, and replays.
SELECT debit_once(1, 'all', 9223372036854775807);
SELECT debit_once(1, 'all', 9223372036854775807);
SELECT balance FROM account WHERE account_id = 1;

-- No digit of a large balance or amount is rounded, in the answer or in the record.
SELECT debit_once(2, 'one', 1);
SELECT debit_once(2, 'odd', 9007199254740993);
SELECT request, response, response ->> 'balance' = balance::text AS same
  FROM request_result JOIN account USING (account_id) WHERE request_key = 'odd';
-- Amounts that differ in the last digit beyond a double's precision are different amounts.
SELECT * FROM refusal($$SELECT debit_once(2, 'odd', 9007199254740992)$$);
SELECT debit_once(2, 'odd', 9007199254740993);

-- The smallest amounts are refused, and no overflow gets in the way.
SELECT amount, code, message
  FROM unnest(ARRAY[-9223372036854775808, -9223372036854775807, -1, 0]) AS amount,
       refusal(format('SELECT debit_once(2, %L, %L)', 'negative', amount));

-- The whole balance can be taken; then the smallest amount is too much.
SELECT debit_once(4, 'whole', 1);
SELECT * FROM refusal($$SELECT debit_once(4, 'more', 1)$$);
SELECT debit_once(4, 'whole', 1);

-- One more than the balance is too much, at both ends.
SELECT * FROM refusal($$SELECT debit_once(3, 'k', 1)$$);
SELECT * FROM refusal($$SELECT debit_once(3, 'k', 9223372036854775807)$$);
SELECT * FROM refusal($$SELECT debit_once(0, 'k', 11)$$);
SELECT debit_once(0, 'k', 10);

-- Every bigint can name an account.
SELECT debit_once(-1, 'k', 1), debit_once(9223372036854775807, 'k', 2), debit_once(-9223372036854775808, 'k', 3);

-- An amount beyond bigint, or with decimals, is no call of this function.
SELECT debit_once(2, 'k', 9223372036854775808);
SELECT debit_once(2, 'k', 1.5);

SELECT account_id, balance FROM account ORDER BY account_id;
SELECT account_id, request_key, request, response FROM request_result ORDER BY account_id, request_key;

DROP FUNCTION refusal;
DROP EXTENSION idempotency_record;
