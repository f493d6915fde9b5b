-- Debits and credits of many in one call.

CREATE FUNCTION "debit_batch_once"(
	"p_accounts" bigint[], /* Option < Int8Array > */
	"p_keys" text[], /* Option < TextArray > */
	"p_amounts" bigint[] /* Option < Int8Array > */
) RETURNS TABLE (
	"ordinal" bigint,  /* i64 */
	"response" jsonb,  /* Option < Jsonb > */
	"replayed" bool,  /* bool */
	"sqlstate" TEXT,  /* Option < String > */
	"message" TEXT  /* Option < String > */
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c /* Rust */
AS 'MODULE_PATHNAME', 'debit_batch_once_wrapper';

CREATE FUNCTION "credit_batch_once"(
	"p_accounts" bigint[], /* Option < Int8Array > */
	"p_keys" text[], /* Option < TextArray > */
	"p_amounts" bigint[] /* Option < Int8Array > */
) RETURNS TABLE (
	"ordinal" bigint,  /* i64 */
	"response" jsonb,  /* Option < Jsonb > */
	"replayed" bool,  /* bool */
	"sqlstate" TEXT,  /* Option < String > */
	"message" TEXT  /* Option < String > */
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c /* Rust */
AS 'MODULE_PATHNAME', 'credit_batch_once_wrapper';

REVOKE ALL ON FUNCTION debit_batch_once(bigint[], text[], bigint[]) FROM PUBLIC;
COMMENT ON FUNCTION debit_batch_once(bigint[], text[], bigint[]) IS
    'Debits once for each key, as debit_once would one after the other, and returns a row for each element, in their order: the response and whether it is a replay, or SQLSTATE and message of its refusal. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION credit_batch_once(bigint[], text[], bigint[]) FROM PUBLIC;
COMMENT ON FUNCTION credit_batch_once(bigint[], text[], bigint[]) IS
    'Credits once for each key, as credit_once would one after the other, and returns a row for each element, in their order: the response and whether it is a replay, or SQLSTATE and message of its refusal. The caller needs EXECUTE.';
