//! Every SQL text that the extension runs and its saved plan.
//!
//! A text names the extension's schema `@extschema@`, as extension scripts do, and qualifies everything else, operators
//! included: neither search_path nor temporary objects of the caller can stand in. Plans are prepared when they are
//! first needed, follow DDL by themselves, and are prepared anew when the extension was created in another schema or
//! its schema was renamed.

use std::cell::RefCell;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use pgrx::datum::DatumWithOid;
use pgrx::prelude::*;
use pgrx::spi::SpiClient;

use crate::error::Error;
use crate::raw::{
    ClaimTables, Columns, Extension, Plan, Planning, Rows, accept_invalidations, catalog_generation, find_extension,
};

/// The first version, see [`Statement`].
const VERSION_0_1: &[u8] = b"0.1.0";
/// The tables that came later, and the versions that lack them.
const LACKING: [(&CStr, &[&[u8]]); 3] = [
    (c"operation_policy", &[VERSION_0_1]),
    (c"subscriber_policy", &[VERSION_0_1, b"0.2.0"]),
    (c"retention_fence", &[VERSION_0_1, b"0.2.0"]),
];

/// How often a statement is planned anew because the extension's schema was renamed meanwhile.
const ATTEMPTS: usize = 3;

/// One SQL text with the types of its parameters.
pub struct Statement {
    text: &'static str,
    /// The text for an extension whose objects are still those of 0.1.0: between the installation of a new library and
    /// ALTER EXTENSION UPDATE, debits go on.
    text_0_1: Option<&'static str>,
    parameters: &'static [PgBuiltInOids],
    /// What follows the text, for texts with a common end.
    returning: &'static str,
    planning: Planning,
    /// What `@records@` and `@name@` stand for in the text.
    records: Option<Records>,
}

/// Records of one kind, for statements that are the same for both.
struct Records {
    /// Their table.
    table: &'static str,
    /// The column by which a purge tells them apart, which is also the kind of their subject, and begins the name of the table
    /// of its policies.
    name: &'static str,
}

const REQUESTS: Records = Records { table: "request_result", name: "operation" };
const MESSAGES: Records = Records { table: "processed_message", name: "subscriber" };

/// What most statements have in common.
const BY_INDEX: Statement =
    Statement { text: "", text_0_1: None, parameters: &[], returning: "", planning: Planning::ByIndex, records: None };

/// The same for statements that take the first rows of many.
const IN_ORDER: Statement = Statement { planning: Planning::InOrder, ..BY_INDEX };

/// The end of a claim: nothing if the key is taken, else the record, and whether it is the one that was claimed. Under a key
/// that a trigger rewrote a repeat would not be found; a record that one marked cancelled would deny the execution.
macro_rules! claimed {
    () => {
        "
           ON CONFLICT (account_id, operation, request_key) DO NOTHING
           RETURNING response, created_at,
                     account_id OPERATOR(pg_catalog.=) $1
                     AND operation OPERATOR(pg_catalog.=) $2
                     AND request_key OPERATOR(pg_catalog.=) $3
                     AND request OPERATOR(pg_catalog.=) $4
                     AND NOT cancelled
                     AND COALESCE(request_fingerprint OPERATOR(pg_catalog.=) $5,
                                  request_fingerprint IS NULL AND $5 IS NULL)"
    };
}

/// $1 account, $2 operation, $3 key, $4 request: the saved response, when it was executed, whether the saved request is
/// the same, whether it was cancelled, and the fingerprint, where that is all that was saved of the request.
///
/// Rows are compared, since only the primary key can serve that: for a table that was empty when it was analyzed, the planner
/// takes the index by operation and time for as good, and the plan that reads all records of the operation would stay.
pub static FIND: Statement = Statement {
    text: "SELECT response, created_at, request OPERATOR(pg_catalog.=) $4, cancelled, request_fingerprint
             FROM @extschema@.request_result
            WHERE account_id OPERATOR(pg_catalog.=) $1
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.>=) ($1, $2, $3)
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.<=) ($1, $2, $3)",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID, PgBuiltInOids::JSONBOID],
    text_0_1: Some(
        "SELECT response, created_at, request OPERATOR(pg_catalog.=) $4, false, CAST(NULL AS pg_catalog.bytea)
             FROM @extschema@.request_result
            WHERE account_id OPERATOR(pg_catalog.=) $1
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.>=) ($1, $2, $3)
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.<=) ($1, $2, $3)",
    ),
    ..BY_INDEX
};

/// $1 account, $2 operation, $3 key: the saved response, and whether the request was cancelled.
pub static FIND_SAVED: Statement = Statement {
    text: "SELECT response, cancelled
             FROM @extschema@.request_result
            WHERE account_id OPERATOR(pg_catalog.=) $1
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.>=) ($1, $2, $3)
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.<=) ($1, $2, $3)",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID],
    ..BY_INDEX
};

/// $1 account, $2 operation, $3 key: the rest of the record.
pub static FIND_RECORD: Statement = Statement {
    text: "SELECT request, response, created_at, request_fingerprint, cancelled
             FROM @extschema@.request_result
            WHERE account_id OPERATOR(pg_catalog.=) $1
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.>=) ($1, $2, $3)
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.<=) ($1, $2, $3)",
    parameters: FIND_SAVED.parameters,
    ..BY_INDEX
};

/// $1 to $4 as in [`FIND`]: the names of the fields that were sent and differ from the saved request, and whether that has
/// others, whose names the caller may be guessing; no row where there are no fields. IS DISTINCT FROM cannot be qualified,
/// hence COALESCE.
pub static FIND_DIFFERENCE: Statement = Statement {
    text: "SELECT (SELECT pg_catalog.string_agg(field, ', ')
                     FROM pg_catalog.jsonb_object_keys($4) AS field
                    WHERE COALESCE((saved.request OPERATOR(pg_catalog.->) field)
                                   OPERATOR(pg_catalog.<>) ($4 OPERATOR(pg_catalog.->) field), true)),
                  EXISTS (SELECT FROM pg_catalog.jsonb_object_keys(saved.request) AS field
                           WHERE NOT $4 OPERATOR(pg_catalog.?) field)
             FROM @extschema@.request_result AS saved
            WHERE saved.account_id OPERATOR(pg_catalog.=) $1
              AND (saved.account_id, saved.operation, saved.request_key) OPERATOR(pg_catalog.>=) ($1, $2, $3)
              AND (saved.account_id, saved.operation, saved.request_key) OPERATOR(pg_catalog.<=) ($1, $2, $3)
              AND saved.request_fingerprint IS NULL
              AND pg_catalog.jsonb_typeof(saved.request) OPERATOR(pg_catalog.=) 'object'
              AND pg_catalog.jsonb_typeof($4) OPERATOR(pg_catalog.=) 'object'",
    parameters: FIND.parameters,
    text_0_1: Some("SELECT 'amount', false"),
    ..BY_INDEX
};

/// $1 account, $2 operation, $3 key, $4 request as it is stored, $5 its fingerprint if that is stored instead, $6 what is
/// added to the balance: locks the account where its balance allows it and takes the key with the final response; no row
/// if the balance does not suffice, the account does not exist, or the key is taken.
///
/// The account is locked before the key, since the foreign key's lock on a row that somebody then updates would make a
/// MultiXact for each concurrent request. FOR UPDATE would deadlock with the foreign key's locks.
pub static CLAIM: Statement = Statement {
    text: "INSERT INTO @extschema@.request_result
                  (account_id, operation, request_key, request, request_fingerprint, response)
           SELECT account.account_id, $2, $3, $4, $5,
                  pg_catalog.jsonb_build_object('balance', account.balance OPERATOR(pg_catalog.+) $6)
             FROM @extschema@.account
            WHERE account.account_id OPERATOR(pg_catalog.=) $1
              AND account.balance OPERATOR(pg_catalog.+) $6 OPERATOR(pg_catalog.>=) 0
              FOR NO KEY UPDATE",
    parameters: &[
        PgBuiltInOids::INT8OID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::JSONBOID,
        PgBuiltInOids::BYTEAOID,
        PgBuiltInOids::INT8OID,
    ],
    text_0_1: Some(
        "INSERT INTO @extschema@.request_result (account_id, operation, request_key, request, response)
           SELECT account.account_id, $2, $3, $4,
                  pg_catalog.jsonb_build_object('balance', account.balance OPERATOR(pg_catalog.+) $6)
             FROM @extschema@.account
            WHERE account.account_id OPERATOR(pg_catalog.=) $1
              AND account.balance OPERATOR(pg_catalog.+) $6 OPERATOR(pg_catalog.>=) 0
              FOR NO KEY UPDATE
           ON CONFLICT (account_id, operation, request_key) DO NOTHING
           RETURNING response, created_at,
                     account_id OPERATOR(pg_catalog.=) $1
                     AND operation OPERATOR(pg_catalog.=) $2
                     AND request_key OPERATOR(pg_catalog.=) $3
                     AND request OPERATOR(pg_catalog.=) $4",
    ),
    returning: claimed!(),
    ..BY_INDEX
};

/// $1 to $6 as in [`CLAIM`]: takes the key with a refusal as the response, where the balance does not suffice.
pub static CLAIM_REFUSAL: Statement = Statement {
    text: "INSERT INTO @extschema@.request_result
                  (account_id, operation, request_key, request, request_fingerprint, response)
           SELECT account.account_id, $2, $3, $4, $5,
                  pg_catalog.jsonb_build_object('refused', 'insufficient balance', 'balance', account.balance)
             FROM @extschema@.account
            WHERE account.account_id OPERATOR(pg_catalog.=) $1
              AND account.balance OPERATOR(pg_catalog.+) $6 OPERATOR(pg_catalog.<) 0
              FOR NO KEY UPDATE",
    parameters: CLAIM.parameters,
    returning: concat!(claimed!(), "\n                     AND response OPERATOR(pg_catalog.?) 'refused'"),
    ..BY_INDEX
};

/// $1 to $5 as in [`CLAIM`], $6 the response of a handler that ran while the account was locked.
pub static SAVE_RESPONSE: Statement = Statement {
    text: "INSERT INTO @extschema@.request_result
                  (account_id, operation, request_key, request, request_fingerprint, response)
           VALUES ($1, $2, $3, $4, $5, $6)",
    parameters: &[
        PgBuiltInOids::INT8OID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::JSONBOID,
        PgBuiltInOids::BYTEAOID,
        PgBuiltInOids::JSONBOID,
    ],
    returning: concat!(claimed!(), "\n                     AND response OPERATOR(pg_catalog.=) $6"),
    ..BY_INDEX
};

/// $1 account, $2 operation, $3 key: locks the account and takes the key for good; no row if the key is taken or the account
/// does not exist.
pub static CANCEL: Statement = Statement {
    text: "INSERT INTO @extschema@.request_result (account_id, operation, request_key, request, response, cancelled)
           SELECT account.account_id, $2, $3, 'null', 'null', true
             FROM @extschema@.account
            WHERE account.account_id OPERATOR(pg_catalog.=) $1
              FOR NO KEY UPDATE
           ON CONFLICT (account_id, operation, request_key) DO NOTHING
           RETURNING cancelled
                     AND account_id OPERATOR(pg_catalog.=) $1
                     AND operation OPERATOR(pg_catalog.=) $2
                     AND request_key OPERATOR(pg_catalog.=) $3",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID],
    ..BY_INDEX
};

/// $1 account, $2 amount to add, $3 the claimed response: whether the new balance is the one that the response names.
pub static CHANGE_CLAIMED_BALANCE: Statement = Statement {
    text: "UPDATE @extschema@.account
              SET balance = balance OPERATOR(pg_catalog.+) $2
            WHERE account_id OPERATOR(pg_catalog.=) $1
           RETURNING pg_catalog.jsonb_build_object('balance', balance) OPERATOR(pg_catalog.=) $3",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::INT8OID, PgBuiltInOids::JSONBOID],
    ..BY_INDEX
};

/// $1 account, which is locked, $2 amount to add: the balance, where the old one allows it, and whether it is what it must be.
pub static CHANGE_BALANCE: Statement = Statement {
    text: "UPDATE @extschema@.account
              SET balance = account.balance OPERATOR(pg_catalog.+) $2
             FROM (SELECT locked.account_id, locked.balance
                     FROM @extschema@.account AS locked
                    WHERE locked.account_id OPERATOR(pg_catalog.=) $1) AS before
            WHERE account.account_id OPERATOR(pg_catalog.=) $1
              AND before.account_id OPERATOR(pg_catalog.=) account.account_id
              AND account.balance OPERATOR(pg_catalog.+) $2 OPERATOR(pg_catalog.>=) 0
           RETURNING account.balance,
                     account.balance OPERATOR(pg_catalog.=) (before.balance OPERATOR(pg_catalog.+) $2)",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::INT8OID],
    ..BY_INDEX
};

/// $1 accounts, $2 operation, $3 keys, $4 amounts: the records that there are, as [`FIND`] finds each, and which of the
/// requests, from 1, each answers. LIMIT keeps the planner from joining in another way than by a look-up for each.
pub static FIND_MANY: Statement = Statement {
    text: "SELECT saved.response, saved.created_at,
                  saved.request OPERATOR(pg_catalog.=) pg_catalog.jsonb_build_object('amount', given.amount),
                  saved.cancelled, saved.request_fingerprint, given.ordinal
             FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($3), pg_catalog.unnest($4)) WITH ORDINALITY
                  AS given (account_id, request_key, amount, ordinal)
            CROSS JOIN LATERAL (
                  SELECT recorded.response, recorded.created_at, recorded.request, recorded.cancelled,
                         recorded.request_fingerprint
                    FROM @extschema@.request_result AS recorded
                   WHERE (recorded.account_id, recorded.operation, recorded.request_key)
                         OPERATOR(pg_catalog.>=) (given.account_id, $2, given.request_key)
                     AND (recorded.account_id, recorded.operation, recorded.request_key)
                         OPERATOR(pg_catalog.<=) (given.account_id, $2, given.request_key)
                   LIMIT 1) AS saved",
    parameters: &[
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TEXTARRAYOID,
        PgBuiltInOids::INT8ARRAYOID,
    ],
    ..BY_INDEX
};

/// $1 accounts: those that there are.
pub static FIND_ACCOUNTS: Statement = Statement {
    text: "SELECT account_id FROM @extschema@.account WHERE account_id OPERATOR(pg_catalog.=) ANY ($1)",
    parameters: &[PgBuiltInOids::INT8ARRAYOID],
    ..BY_INDEX
};

/// $1 accounts: locks them in ascending order, and returns their balances.
pub static LOCK_BALANCES: Statement = Statement {
    text: "SELECT account_id, balance
             FROM @extschema@.account
            WHERE account_id OPERATOR(pg_catalog.=) ANY ($1)
            ORDER BY account_id
              FOR NO KEY UPDATE",
    parameters: &[PgBuiltInOids::INT8ARRAYOID],
    ..BY_INDEX
};

/// $1 accounts, $2 operation, $3 keys, $4 amounts, $5 fingerprints of the requests or NULL, $6 balances that the responses name,
/// $7 whether they are refusals: records what [`CLAIM`] and [`CLAIM_REFUSAL`] would, for accounts that are locked. Returns
/// the records, whose keys were free, as they are: a trigger may have changed them.
pub static CLAIM_MANY: Statement = Statement {
    text: "INSERT INTO @extschema@.request_result
                  (account_id, operation, request_key, request, request_fingerprint, response)
           SELECT given.account_id, $2, given.request_key,
                  CASE WHEN given.fingerprint IS NULL
                       THEN pg_catalog.jsonb_build_object('amount', given.amount) ELSE 'null' END,
                  given.fingerprint,
                  CASE WHEN given.refused
                       THEN pg_catalog.jsonb_build_object('refused', 'insufficient balance', 'balance', given.balance)
                       ELSE pg_catalog.jsonb_build_object('balance', given.balance) END
             FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($3), pg_catalog.unnest($4), pg_catalog.unnest($5),
                             pg_catalog.unnest($6), pg_catalog.unnest($7))
                  AS given (account_id, request_key, amount, fingerprint, balance, refused)
           ON CONFLICT (account_id, operation, request_key) DO NOTHING
           RETURNING response, account_id, request_key, CAST(request AS pg_catalog.text),
                     CAST(response AS pg_catalog.text), request_fingerprint,
                     operation OPERATOR(pg_catalog.=) $2 AND NOT cancelled",
    parameters: &[
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TEXTARRAYOID,
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::BYTEAARRAYOID,
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::BOOLARRAYOID,
    ],
    ..BY_INDEX
};

/// $1 accounts, which are locked, $2 what is added to their balances: the new balances. ANY keeps the planner from joining in
/// another way than by a look-up of each account.
pub static CHANGE_BALANCES: Statement = Statement {
    text: "UPDATE @extschema@.account
              SET balance = account.balance OPERATOR(pg_catalog.+) change.delta
             FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS change (account_id, delta)
            WHERE account.account_id OPERATOR(pg_catalog.=) ANY (ARRAY[change.account_id])
           RETURNING account.account_id, account.balance",
    parameters: &[PgBuiltInOids::INT8ARRAYOID, PgBuiltInOids::INT8ARRAYOID],
    ..BY_INDEX
};

/// $1 balances: the responses that name them, in their order.
pub static BUILD_BALANCES: Statement = Statement {
    text: "SELECT pg_catalog.jsonb_build_object('balance', given.balance)
             FROM pg_catalog.unnest($1) AS given (balance)",
    parameters: &[PgBuiltInOids::INT8ARRAYOID],
    ..BY_INDEX
};

/// $1 account, $2 operation, $3 key: which transaction wrote the record.
pub static FIND_WRITER: Statement = Statement {
    text: "SELECT xmin
             FROM @extschema@.request_result
            WHERE account_id OPERATOR(pg_catalog.=) $1
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.>=) ($1, $2, $3)
              AND (account_id, operation, request_key) OPERATOR(pg_catalog.<=) ($1, $2, $3)",
    parameters: FIND_SAVED.parameters,
    ..BY_INDEX
};

/// $1 account: locks it.
pub static LOCK_ACCOUNT: Statement = Statement {
    text: "SELECT account_id
             FROM @extschema@.account
            WHERE account_id OPERATOR(pg_catalog.=) $1
              FOR NO KEY UPDATE",
    parameters: &[PgBuiltInOids::INT8OID],
    ..BY_INDEX
};

/// $1 account: its balance.
pub static FIND_BALANCE: Statement = Statement {
    text: "SELECT balance FROM @extschema@.account WHERE account_id OPERATOR(pg_catalog.=) $1",
    parameters: &[PgBuiltInOids::INT8OID],
    ..BY_INDEX
};

/// $1 accounts: one that row security does not let the caller see, else NULL.
pub static FIND_INVISIBLE: Statement = Statement {
    text: "SELECT pg_catalog.min(given.account_id)
             FROM pg_catalog.unnest($1) AS given (account_id)
            WHERE NOT EXISTS (
                  SELECT FROM @extschema@.account
                   WHERE account.account_id OPERATOR(pg_catalog.=) given.account_id)",
    parameters: &[PgBuiltInOids::INT8ARRAYOID],
    ..BY_INDEX
};

/// $1 handler: its qualified name, whether its signature is the expected one, and whether the caller may execute it.
pub static FIND_HANDLER: Statement = Statement {
    text: "SELECT pg_catalog.quote_ident(n.nspname) OPERATOR(pg_catalog.||) '.'
                  OPERATOR(pg_catalog.||) pg_catalog.quote_ident(p.proname),
                  p.prokind OPERATOR(pg_catalog.=) 'f' AND NOT p.proretset
                  AND p.prorettype OPERATOR(pg_catalog.=) CAST('pg_catalog.jsonb' AS pg_catalog.regtype)
                  AND p.pronargs OPERATOR(pg_catalog.=) 2
                  AND p.proargtypes[0] OPERATOR(pg_catalog.=) CAST('pg_catalog.int8' AS pg_catalog.regtype)
                  AND p.proargtypes[1] OPERATOR(pg_catalog.=) CAST('pg_catalog.jsonb' AS pg_catalog.regtype),
                  pg_catalog.has_function_privilege(p.oid, 'EXECUTE')
                  AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')
             FROM pg_catalog.pg_proc AS p
             JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
            WHERE p.oid OPERATOR(pg_catalog.=) $1",
    parameters: &[PgBuiltInOids::REGPROCEDUREOID],
    ..BY_INDEX
};

/// $1 subscriber, $2 message id, $3 account, $4 delta or NULL: whether account and delta are the recorded ones, and the
/// fingerprint of the payload.
///
/// The order of message ids is that of the primary key alone, for the same reason as in [`FIND`]; so in the other statements on
/// messages. It counts only where nothing says that there is one message id.
pub static FIND_MESSAGE: Statement = Statement {
    text: "SELECT account_id OPERATOR(pg_catalog.=) $3, delta OPERATOR(pg_catalog.=) $4, payload_fingerprint
             FROM @extschema@.processed_message
            WHERE subscriber OPERATOR(pg_catalog.=) $1
              AND message_id OPERATOR(pg_catalog.>=) $2
              AND message_id OPERATOR(pg_catalog.<=) $2
            ORDER BY message_id LIMIT 1",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::UUIDOID, PgBuiltInOids::INT8OID, PgBuiltInOids::INT8OID],
    ..IN_ORDER
};

/// $1 subscriber, $2 message id, $3 account, $4 fingerprint of the payload, $5 what will be added to the
/// balance or NULL: locks the account where its balance allows it and records the message, as [`CLAIM`] does.
pub static CLAIM_MESSAGE: Statement = Statement {
    text: "INSERT INTO @extschema@.processed_message (subscriber, message_id, account_id, payload_fingerprint, delta)
           SELECT $1, $2, account.account_id, $4, $5
             FROM @extschema@.account
            WHERE account.account_id OPERATOR(pg_catalog.=) $3
              AND account.balance OPERATOR(pg_catalog.+) COALESCE($5, 0) OPERATOR(pg_catalog.>=) 0
              FOR NO KEY UPDATE
           ON CONFLICT (subscriber, message_id) DO NOTHING
           RETURNING subscriber OPERATOR(pg_catalog.=) $1
                     AND message_id OPERATOR(pg_catalog.=) $2
                     AND account_id OPERATOR(pg_catalog.=) $3
                     AND COALESCE(payload_fingerprint OPERATOR(pg_catalog.=) $4,
                                  payload_fingerprint IS NULL AND $4 IS NULL)
                     AND COALESCE(delta OPERATOR(pg_catalog.=) $5, delta IS NULL AND $5 IS NULL)",
    parameters: &[
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::UUIDOID,
        PgBuiltInOids::INT8OID,
        PgBuiltInOids::BYTEAOID,
        PgBuiltInOids::INT8OID,
    ],
    ..BY_INDEX
};

/// $1 message ids, $2 accounts, $3 payloads or NULL: whether the arrays have one dimension, equal length and no NULL.
pub static CHECK_MESSAGES: Statement = Statement {
    text: "SELECT COALESCE(pg_catalog.array_ndims($1), 1) OPERATOR(pg_catalog.=) 1
              AND COALESCE(pg_catalog.array_ndims($2), 1) OPERATOR(pg_catalog.=) 1
              AND COALESCE(pg_catalog.array_ndims($3), 1) OPERATOR(pg_catalog.=) 1
              AND pg_catalog.cardinality($1) OPERATOR(pg_catalog.=) pg_catalog.cardinality($2)
              AND COALESCE(pg_catalog.cardinality($3) OPERATOR(pg_catalog.=) pg_catalog.cardinality($1), true)
              AND pg_catalog.array_position($1, NULL) IS NULL
              AND pg_catalog.array_position($2, NULL) IS NULL
              AND pg_catalog.array_position($3, NULL) IS NULL",
    parameters: &[PgBuiltInOids::UUIDARRAYOID, PgBuiltInOids::INT8ARRAYOID, PgBuiltInOids::JSONBARRAYOID],
    ..BY_INDEX
};

/// $1 subscriber, $2 message ids: a row if one of them is not recorded.
pub static FIND_NEW_MESSAGE: Statement = Statement {
    text: "SELECT given.message_id
             FROM pg_catalog.unnest($2) AS given (message_id)
            WHERE (SELECT recorded.message_id
                     FROM @extschema@.processed_message AS recorded
                    WHERE recorded.subscriber OPERATOR(pg_catalog.=) $1
                      AND recorded.message_id OPERATOR(pg_catalog.>=) given.message_id
                      AND recorded.message_id OPERATOR(pg_catalog.<=) given.message_id
                    ORDER BY recorded.message_id LIMIT 1) IS NULL
            LIMIT 1",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::UUIDARRAYOID],
    ..IN_ORDER
};

/// $1 subscriber, $2 message ids, $3 accounts: locks the accounts of the messages that are not recorded yet, in one order, so
/// that two callers do not deadlock, also not with what they do to the accounts afterwards. Returns one that cannot be
/// locked, else NULL.
pub static LOCK_ACCOUNTS: Statement = Statement {
    text: "WITH wanted AS MATERIALIZED (
               SELECT given.account_id
                 FROM ROWS FROM (pg_catalog.unnest($2), pg_catalog.unnest($3)) AS given (message_id, account_id)
                WHERE (SELECT recorded.message_id
                         FROM @extschema@.processed_message AS recorded
                        WHERE recorded.subscriber OPERATOR(pg_catalog.=) $1
                          AND recorded.message_id OPERATOR(pg_catalog.>=) given.message_id
                          AND recorded.message_id OPERATOR(pg_catalog.<=) given.message_id
                        ORDER BY recorded.message_id LIMIT 1) IS NULL
           ), locked AS MATERIALIZED (
               SELECT account.account_id
                 FROM @extschema@.account
                WHERE account.account_id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT account_id FROM wanted))
                ORDER BY account.account_id
                  FOR NO KEY UPDATE
           )
           SELECT pg_catalog.min(wanted.account_id)
             FROM wanted
             LEFT JOIN locked ON locked.account_id OPERATOR(pg_catalog.=) wanted.account_id
            WHERE locked.account_id IS NULL",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::UUIDARRAYOID, PgBuiltInOids::INT8ARRAYOID],
    ..IN_ORDER
};

/// $1 subscriber, $2 message ids, $3 accounts, $4 fingerprints of the payloads or NULL: records the messages in the order of their ids, and
/// returns the ids that are new in the order in which they were given, and whether they are recorded as they were given.
pub static ACCEPT_MESSAGES: Statement = Statement {
    text: "WITH given AS (
               SELECT DISTINCT ON (message_id)
                      message_id, account_id, fingerprint, ordinal
                 FROM ROWS FROM (pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4)) WITH ORDINALITY
                      AS given (message_id, account_id, fingerprint, ordinal)
                ORDER BY message_id, ordinal
           ), accepted AS (
               INSERT INTO @extschema@.processed_message (subscriber, message_id, account_id, payload_fingerprint)
               SELECT $1, message_id, account_id, fingerprint
                 FROM given
                ORDER BY message_id
               ON CONFLICT (subscriber, message_id) DO NOTHING
               RETURNING subscriber, message_id, account_id, payload_fingerprint
           )
           SELECT pg_catalog.array_agg(given.message_id ORDER BY given.ordinal),
                  (SELECT pg_catalog.count(accepted.message_id) FROM accepted)
                  OPERATOR(pg_catalog.=) pg_catalog.count(given.message_id)
                  AND COALESCE(pg_catalog.bool_and(
                          accepted.subscriber OPERATOR(pg_catalog.=) $1
                          AND accepted.account_id OPERATOR(pg_catalog.=) given.account_id
                          AND COALESCE(accepted.payload_fingerprint OPERATOR(pg_catalog.=) given.fingerprint,
                                       accepted.payload_fingerprint IS NULL AND given.fingerprint IS NULL)), true)
             FROM given
             JOIN accepted ON accepted.message_id OPERATOR(pg_catalog.=) given.message_id",
    parameters: &[
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::UUIDARRAYOID,
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::BYTEAARRAYOID,
    ],
    ..BY_INDEX
};

/// $1 to $4 as in [`ACCEPT_MESSAGES`]: no row if every message is recorded as it was given, else whether an account and
/// whether a payload differs; NULL and NULL if one is not recorded at all.
pub static FIND_MESSAGES_REUSED: Statement = Statement {
    text: "SELECT recorded.account_id OPERATOR(pg_catalog.<>) given.account_id AS account_differs,
                  recorded.payload_fingerprint OPERATOR(pg_catalog.<>) given.fingerprint AS payload_differs
             FROM ROWS FROM (pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4))
                  AS given (message_id, account_id, fingerprint)
             LEFT JOIN LATERAL (
                  SELECT message_id, account_id, payload_fingerprint
                    FROM @extschema@.processed_message
                   WHERE subscriber OPERATOR(pg_catalog.=) $1
                     AND message_id OPERATOR(pg_catalog.>=) given.message_id
                     AND message_id OPERATOR(pg_catalog.<=) given.message_id
                   ORDER BY message_id LIMIT 1) AS recorded ON true
            WHERE recorded.message_id IS NULL
               OR recorded.account_id OPERATOR(pg_catalog.<>) given.account_id
               OR recorded.payload_fingerprint OPERATOR(pg_catalog.<>) given.fingerprint
            ORDER BY account_differs DESC NULLS LAST
            LIMIT 1",
    parameters: &[
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::UUIDARRAYOID,
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::BYTEAARRAYOID,
    ],
    ..IN_ORDER
};

/// $1 subscriber, $2 entity, $3 version: a row if this or a later version was accepted.
pub static FIND_NEWER_VERSION: Statement = Statement {
    text: "SELECT version
             FROM @extschema@.accepted_version
            WHERE subscriber OPERATOR(pg_catalog.=) $1
              AND entity OPERATOR(pg_catalog.=) $2
              AND version OPERATOR(pg_catalog.>=) $3",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID, PgBuiltInOids::INT8OID],
    ..BY_INDEX
};

/// $1 subscriber, $2 entity, $3 version: accepts the version if it is above the accepted one.
pub static ACCEPT_VERSION: Statement = Statement {
    text: "INSERT INTO @extschema@.accepted_version AS accepted (subscriber, entity, version)
           VALUES ($1, $2, $3)
           ON CONFLICT (subscriber, entity) DO UPDATE
              SET version = excluded.version, accepted_at = excluded.accepted_at
            WHERE accepted.version OPERATOR(pg_catalog.<) excluded.version
           RETURNING subscriber OPERATOR(pg_catalog.=) $1
                     AND entity OPERATOR(pg_catalog.=) $2
                     AND version OPERATOR(pg_catalog.=) $3",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID, PgBuiltInOids::INT8OID],
    ..BY_INDEX
};

/// $1 retention, $2 the shortest allowed: up to when records are expired now, or NULL if the retention is negative; and
/// whether it is shorter than allowed. An interval such as '1 month -29 days' is negative in some months only, so the date
/// is what counts.
pub static FIND_CUTOFF: Statement = Statement {
    text: "SELECT CASE WHEN $1 OPERATOR(pg_catalog.>=) pg_catalog.make_interval()
                        AND cutoff OPERATOR(pg_catalog.<=) now THEN cutoff END,
                  CASE WHEN $1 OPERATOR(pg_catalog.>=) pg_catalog.make_interval()
                       THEN cutoff OPERATOR(pg_catalog.>) (now OPERATOR(pg_catalog.-) $2) END
             FROM (SELECT now, now OPERATOR(pg_catalog.-) $1 AS cutoff
                     FROM (SELECT pg_catalog.clock_timestamp() AS now OFFSET 0) AS clock) AS reading",
    parameters: &[PgBuiltInOids::INTERVALOID, PgBuiltInOids::INTERVALOID],
    ..BY_INDEX
};

/// $1 cutoff: deletes what is older, where the extension's objects are those of a version before 0.3.0.
pub static DELETE_EXPIRED_KEYS: Statement = Statement {
    text: "DELETE FROM @extschema@.request_result
            WHERE ctid OPERATOR(pg_catalog.=) ANY (ARRAY(
                  SELECT ctid FROM @extschema@.request_result
                   WHERE created_at OPERATOR(pg_catalog.<) $1
                     FOR UPDATE SKIP LOCKED))",
    parameters: &[PgBuiltInOids::TIMESTAMPTZOID],
    ..BY_INDEX
};

/// Takes the right to purge until the end of the transaction: no row if another session has it.
pub static LOCK_PURGE: Statement =
    Statement { text: "SELECT FROM @extschema@.purge_lock FOR UPDATE SKIP LOCKED", parameters: &[], ..IN_ORDER };

/// The operations that have records, a policy or a fence, and when their last purge began. An index entry of a deleted record
/// may have to be stepped over while an old snapshot is held; an operation's newest entry is the least likely to be one.
pub static FIND_OPERATIONS: Statement = Statement {
    text: "WITH RECURSIVE found AS (
               (SELECT @name@ AS name FROM @extschema@.@records@
                 ORDER BY @name@ DESC, created_at DESC LIMIT 1)
               UNION ALL
               SELECT (SELECT next.@name@ FROM @extschema@.@records@ AS next
                        WHERE next.@name@ OPERATOR(pg_catalog.<) found.name
                        ORDER BY next.@name@ DESC, next.created_at DESC LIMIT 1)
                 FROM found WHERE found.name IS NOT NULL
           ), subject AS (
               SELECT name FROM found WHERE name IS NOT NULL
               UNION SELECT @name@ FROM @extschema@.@name@_policy
               UNION SELECT name FROM @extschema@.retention_fence WHERE kind OPERATOR(pg_catalog.=) '@name@'
           )
           SELECT subject.name, progress.purged_at
             FROM subject
             LEFT JOIN @extschema@.purge_progress AS progress
               ON progress.kind OPERATOR(pg_catalog.=) '@name@'
              AND progress.name OPERATOR(pg_catalog.=) subject.name
            ORDER BY subject.name",
    records: Some(REQUESTS),
    ..BY_INDEX
};

/// As [`FIND_OPERATIONS`], the subscribers.
pub static FIND_SUBSCRIBERS: Statement = Statement { text: FIND_OPERATIONS.text, records: Some(MESSAGES), ..BY_INDEX };

/// $1 operation, $2 from, $3 to, $4 how many: deletes the oldest records of the time, skipping what another session holds.
/// Returns how many it found, the time of the last of them, and how many it deleted.
pub static DELETE_REQUESTS: Statement = Statement {
    text: "WITH expired AS MATERIALIZED (
               SELECT ctid, created_at
                 FROM @extschema@.@records@
                WHERE @name@ OPERATOR(pg_catalog.=) $1
                  AND created_at OPERATOR(pg_catalog.>=) $2
                  AND created_at OPERATOR(pg_catalog.<) $3
                ORDER BY created_at
                LIMIT $4
                  FOR UPDATE SKIP LOCKED
           ), deleted AS (
               DELETE FROM @extschema@.@records@
                WHERE ctid OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT ctid FROM expired))
               RETURNING created_at
           )
           SELECT (SELECT pg_catalog.count(created_at) FROM expired),
                  (SELECT pg_catalog.max(created_at) FROM expired),
                  (SELECT pg_catalog.count(created_at) FROM deleted)",
    parameters: &[
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TIMESTAMPTZOID,
        PgBuiltInOids::TIMESTAMPTZOID,
        PgBuiltInOids::INT8OID,
    ],
    records: Some(REQUESTS),
    ..IN_ORDER
};

/// As [`DELETE_REQUESTS`], the messages of subscriber $1.
pub static DELETE_MESSAGES: Statement = Statement {
    text: DELETE_REQUESTS.text,
    parameters: DELETE_REQUESTS.parameters,
    records: Some(MESSAGES),
    ..IN_ORDER
};

/// $1 operation, $2 from, $3 to, $4 at most: how many records of the time are there, and the time of the first that is not
/// older than $2.
pub static COUNT_REQUESTS: Statement = Statement {
    text: "SELECT (SELECT pg_catalog.count(created_at)
                     FROM (SELECT created_at FROM @extschema@.@records@
                            WHERE @name@ OPERATOR(pg_catalog.=) $1
                              AND created_at OPERATOR(pg_catalog.>=) $2
                              AND created_at OPERATOR(pg_catalog.<) $3
                            LIMIT $4) AS expired),
                  (SELECT created_at FROM @extschema@.@records@
                    WHERE @name@ OPERATOR(pg_catalog.=) $1
                      AND created_at OPERATOR(pg_catalog.>=) $2
                    ORDER BY created_at LIMIT 1)",
    parameters: DELETE_REQUESTS.parameters,
    records: Some(REQUESTS),
    ..IN_ORDER
};

/// As [`COUNT_REQUESTS`], the messages of subscriber $1.
pub static COUNT_MESSAGES: Statement =
    Statement { text: COUNT_REQUESTS.text, parameters: COUNT_REQUESTS.parameters, records: Some(MESSAGES), ..IN_ORDER };

/// $1 kind, $2 name: locks the fence; no row if there is none, or another session holds it.
pub static LOCK_FENCE: Statement = Statement {
    text: "SELECT FROM @extschema@.retention_fence
            WHERE kind OPERATOR(pg_catalog.=) $1
              AND name OPERATOR(pg_catalog.=) $2
              FOR UPDATE SKIP LOCKED",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID],
    ..BY_INDEX
};

/// $1 kind, $2 name, $3 cutoff: moves the fence, never back.
pub static MOVE_FENCE: Statement = Statement {
    text: "INSERT INTO @extschema@.retention_fence AS fence (kind, name, purged_before)
           VALUES ($1, $2, $3)
           ON CONFLICT (kind, name) DO UPDATE
              SET purged_before = excluded.purged_before
            WHERE fence.purged_before OPERATOR(pg_catalog.<) excluded.purged_before",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID, PgBuiltInOids::TIMESTAMPTZOID],
    ..BY_INDEX
};

/// $1 kind, $2 name: up to when everything was deleted, and whether what is older is due for another look: that may take
/// one hundredth of the time, at most.
pub static FIND_PROGRESS: Statement = Statement {
    text: "SELECT deleted_before,
                  sweep_duration OPERATOR(pg_catalog.<) pg_catalog.make_interval(0, 0, 0, 0, 0, 0, 0.1)
                  OR (swept_at OPERATOR(pg_catalog.+) (sweep_duration OPERATOR(pg_catalog.*) 100))
                     OPERATOR(pg_catalog.<) pg_catalog.clock_timestamp()
             FROM @extschema@.purge_progress
            WHERE kind OPERATOR(pg_catalog.=) $1
              AND name OPERATOR(pg_catalog.=) $2",
    parameters: &[PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID],
    ..BY_INDEX
};

/// $1 kind, $2 name, $3 up to when everything is deleted, $4 when the purge began, $5 how many it deleted, $6 how long
/// the last look at what is older than $3 took, or NULL if there was none.
pub static SAVE_PROGRESS: Statement = Statement {
    text: "INSERT INTO @extschema@.purge_progress AS progress
                  (kind, name, deleted_before, purged_at, duration, deleted, swept_at, sweep_duration)
           SELECT $1, $2, $3, $4, now OPERATOR(pg_catalog.-) $4, $5, now, COALESCE($6, pg_catalog.make_interval())
             FROM (SELECT pg_catalog.clock_timestamp() AS now OFFSET 0) AS clock
           ON CONFLICT (kind, name) DO UPDATE
              SET deleted_before = excluded.deleted_before,
                  purged_at = excluded.purged_at,
                  duration = excluded.duration,
                  deleted = excluded.deleted,
                  swept_at = CASE WHEN $6 IS NULL THEN progress.swept_at ELSE excluded.swept_at END,
                  sweep_duration = CASE WHEN $6 IS NULL THEN progress.sweep_duration ELSE excluded.sweep_duration END",
    parameters: &[
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TIMESTAMPTZOID,
        PgBuiltInOids::TIMESTAMPTZOID,
        PgBuiltInOids::INT8OID,
        PgBuiltInOids::INTERVALOID,
    ],
    ..BY_INDEX
};

/// The saved plans of this backend, valid for one incarnation of the extension in one schema and version.
struct Plans {
    generation: u64,
    extension: Rc<Extension>,
    saved: Vec<(&'static Statement, Rc<Plan>)>,
}

thread_local! {
    // Not dropped at the end of the process, when the server's memory is gone already.
    static PLANS: ManuallyDrop<RefCell<Option<Plans>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

impl Statement {
    /// Runs the statement with the privileges of our tables' owners, see [`Plan::run`].
    pub fn run<'conn>(
        &'static self,
        connected: &SpiClient<'conn>,
        arguments: &[DatumWithOid<'_>],
    ) -> Result<Rows<'conn>, Error> {
        // The call may have waited since it began, for a lock or for a trigger, and the schema got another name meanwhile.
        accept_invalidations();
        // Again where that happens while the statement is planned, which nobody does more than a few times.
        for _ in 0..ATTEMPTS {
            let known = extension()?;
            let generation = catalog_generation();
            let same = || catalog_generation() == generation || extension().is_ok_and(|now| *now == *known);
            // No borrow is held while the plan runs: a trigger may call us again.
            let plan = self.plan(connected, &known)?;
            if let Some(rows) = plan.run(connected, arguments, known.tables(), same)? {
                return Ok(rows);
            }
        }
        Err(Error::ForeignTable)
    }

    fn plan(&'static self, connected: &SpiClient<'_>, extension: &Extension) -> Result<Rc<Plan>, Error> {
        let saved = with_plans(|plans| {
            plans.saved.iter().find(|(statement, _)| std::ptr::eq(*statement, self)).map(|(_, plan)| Rc::clone(plan))
        });
        if let Some(plan) = saved.flatten() {
            return Ok(plan);
        }
        let text_0_1 = self.text_0_1.filter(|_| extension.version == VERSION_0_1);
        let text = text_0_1.map_or_else(|| [self.text, self.returning].concat(), str::to_owned);
        let text = match &self.records {
            Some(records) => text.replace("@records@", records.table).replace("@name@", records.name),
            None => text,
        };
        let text = text.split("@extschema@").map(str::as_bytes).collect::<Vec<_>>().join(&extension.schema[..]);
        let plan = Rc::new(Plan::prepare(connected, text, self.parameters, self.planning)?);
        with_plans(|plans| plans.saved.push((self, Rc::clone(&plan))));
        Ok(plan)
    }
}

/// The extension's own table of this name; `None` for a version that has none.
pub fn own_table(name: &CStr) -> Result<Option<pg_sys::Oid>, Error> {
    let extension = extension()?;
    if let Some(table) = extension.table(name) {
        return Ok(Some(table));
    }
    let lacking = LACKING.iter().any(|(table, versions)| *table == name && versions.contains(&&extension.version[..]));
    if lacking { Ok(None) } else { Err(Error::ForeignTable) }
}

/// `request_result` and its columns; `None` for a version that lacks some of them.
pub fn request_table() -> Result<Option<(pg_sys::Oid, Columns)>, Error> {
    let extension = extension()?;
    Ok(extension.table(c"request_result").zip(extension.request_columns))
}

/// Where requests are claimed; `None` for a version that lacks a column.
pub fn claim_tables() -> Result<Option<ClaimTables>, Error> {
    let extension = extension()?;
    let account = extension.table(c"account").zip(extension.account_columns);
    Ok(account.zip(request_table()?).map(|(account, requests)| ClaimTables { account, requests }))
}

fn with_plans<T>(work: impl FnOnce(&mut Plans) -> T) -> Option<T> {
    PLANS.with(|plans| plans.borrow_mut().as_mut().map(work))
}

/// The extension, looked up again only after a change of the catalogues. Plans of an earlier schema, version or incarnation
/// are let go.
fn extension() -> Result<Rc<Extension>, Error> {
    let generation = catalog_generation();
    let known = with_plans(|plans| (plans.generation == generation).then(|| Rc::clone(&plans.extension)));
    if let Some(extension) = known.flatten() {
        return Ok(extension);
    }
    let found = Rc::new(find_extension().ok_or(Error::NotInstalled)?);
    let outdated = PLANS.with(|plans| {
        let mut plans = plans.borrow_mut();
        match plans.as_mut() {
            Some(same) if *same.extension == *found => {
                same.generation = generation;
                None
            }
            _ => plans.replace(Plans { generation, extension: Rc::clone(&found), saved: Vec::new() }),
        }
    });
    drop(outdated);
    Ok(found)
}

#[cfg(test)]
mod tests {
    const SOURCE: &str = include_str!("statement.rs");
    const VERBS: [&str; 6] = ["SELECT", "INSERT", "UPDATE", "DELETE", "WITH", "\n           ON CONFLICT"];
    /// What may precede a parenthesis without being a function.
    const KEYWORDS: [&str; 29] = [
        "accepted",
        "accepted_version",
        "and",
        "any",
        "array",
        "as",
        "by",
        "cast",
        "change",
        "coalesce",
        "conflict",
        "exists",
        "fence",
        "from",
        "given",
        "lateral",
        "materialized",
        "not",
        "on",
        "operator",
        "or",
        "processed_message",
        "progress",
        "recursive",
        "request_result",
        "select",
        "values",
        "when",
        "where",
    ];
    /// What SET assigns is no comparison.
    const ASSIGNMENTS: [&str; 11] = [
        "balance = balance",
        "balance = account.balance",
        "version = excluded.version",
        "accepted_at = excluded.accepted_at",
        "purged_before = excluded.purged_before",
        "deleted_before = excluded.deleted_before",
        "purged_at = excluded.purged_at",
        "duration = excluded.duration",
        "deleted = excluded.deleted",
        "swept_at = CASE",
        "sweep_duration = CASE",
    ];
    /// What may follow FROM, JOIN, INTO or UPDATE: qualified names, derived tables, WITH queries, clauses.
    const RELATIONS: [&str; 18] = [
        "SET",
        "OF",
        "@extschema@.",
        "pg_catalog.",
        "(",
        ")",
        "ROWS",
        "LATERAL",
        "SKIP",
        "ON",
        "given",
        "accepted",
        "wanted",
        "locked",
        "found",
        "subject",
        "expired",
        "deleted",
    ];

    /// The SQL texts of this file with literals blanked and qualified operators taken out.
    fn texts() -> Vec<String> {
        let code = SOURCE.split("#[cfg(test)]").next().unwrap_or_default();
        let literals = code.split('"').skip(1).step_by(2);
        let texts: Vec<String> =
            literals.filter(|text| VERBS.iter().any(|verb| text.starts_with(verb))).map(bare).collect();
        let has_text = |statement: &&str| {
            let text = statement.split("text: ").nth(1).unwrap_or_default();
            // Or it is the text of another statement, where it is read.
            assert!(text.starts_with('"') || text.starts_with(char::is_uppercase), "no text: {statement}");
            text.starts_with('"')
        };
        let own = code.split("pub static ").skip(1).filter(has_text).count();
        let expected = own + code.matches("text_0_1: Some(").count();
        assert_eq!(texts.len(), expected + 1, "all statements and claimed");
        texts
    }

    fn bare(sql: &str) -> String {
        let mut text: String = sql.split('\'').step_by(2).collect::<Vec<_>>().join("literal");
        for assignment in ASSIGNMENTS {
            text = text.replace(assignment, "assignment");
        }
        while let Some(start) = text.find("OPERATOR(pg_catalog.") {
            let end = start + text[start..].find(')').expect("closed") + 1;
            text.replace_range(start..end, "operator");
        }
        text
    }

    #[test]
    fn every_operator_is_qualified() {
        for text in texts() {
            let signs = text.chars().filter(|c| "=<>+-*/|~!#%^&?".contains(*c)).count();
            assert_eq!(signs, 0, "an operator without OPERATOR(pg_catalog...): {text}");
            for implied in [" IN ", " BETWEEN ", " LIKE ", " IS DISTINCT ", "NULLIF", " USING "] {
                assert!(!text.contains(implied), "{implied} looks for an operator in the search path: {text}");
            }
        }
    }

    #[test]
    fn every_function_is_qualified() {
        for text in texts() {
            for (at, _) in text.match_indices('(') {
                let before = text[..at].trim_end();
                let word =
                    before.rsplit(|c: char| !(c.is_alphanumeric() || "_.@".contains(c))).next().unwrap_or_default();
                let known = word.is_empty()
                    || word.starts_with("pg_catalog.")
                    || word.starts_with("@extschema@.")
                    || KEYWORDS.contains(&word.to_lowercase().as_str());
                assert!(known, "a function without pg_catalog: {word} in {text}");
            }
        }
    }

    #[test]
    fn every_table_is_qualified() {
        for text in texts() {
            let words: Vec<&str> = text.split_whitespace().collect();
            for pair in words.windows(2).filter(|pair| ["FROM", "JOIN", "INTO", "UPDATE"].contains(&pair[0])) {
                let known = RELATIONS.iter().any(|start| pair[1].starts_with(start));
                assert!(known, "an unqualified table: {} in {text}", pair[1]);
            }
        }
    }
}
