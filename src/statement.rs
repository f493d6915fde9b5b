//! Every SQL text that the extension runs and its saved plan.
//!
//! A text names the extension's schema `@extschema@`, as extension scripts do, and qualifies everything else, operators
//! included: neither search_path nor temporary objects of the caller can stand in. Plans are prepared when they are
//! first needed, follow DDL by themselves, and are prepared anew when the extension was created in another schema or
//! its schema was renamed.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use pgrx::datum::DatumWithOid;
use pgrx::prelude::*;
use pgrx::spi::SpiClient;

use crate::error::Error;
use crate::raw::{Plan, Planning, Rows, catalog_generation};

/// One SQL text with the types of its parameters.
pub struct Statement {
    text: &'static str,
    parameters: &'static [PgBuiltInOids],
    planning: Planning,
}

/// $1 account, $2 operation, $3 key, $4 request: whether the saved request is the same, and the saved response.
pub static FIND: Statement = Statement {
    text: "SELECT request OPERATOR(pg_catalog.=) $4, response
             FROM @extschema@.request_result
            WHERE account_id OPERATOR(pg_catalog.=) $1
              AND operation OPERATOR(pg_catalog.=) $2
              AND request_key OPERATOR(pg_catalog.=) $3",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::TEXTOID, PgBuiltInOids::TEXTOID, PgBuiltInOids::JSONBOID],
    planning: Planning::ByIndex,
};

/// $1 to $4 as in [`FIND`]: the names of the fields in which the saved request differs. IS DISTINCT FROM cannot be
/// qualified, hence COALESCE.
pub static FIND_DIFFERENCE: Statement = Statement {
    text: "SELECT (SELECT pg_catalog.string_agg(field, ', ')
                     FROM pg_catalog.jsonb_object_keys(saved.request OPERATOR(pg_catalog.||) $4) AS field
                    WHERE COALESCE((saved.request OPERATOR(pg_catalog.->) field)
                                   OPERATOR(pg_catalog.<>) ($4 OPERATOR(pg_catalog.->) field), true))
             FROM @extschema@.request_result AS saved
            WHERE saved.account_id OPERATOR(pg_catalog.=) $1
              AND saved.operation OPERATOR(pg_catalog.=) $2
              AND saved.request_key OPERATOR(pg_catalog.=) $3",
    parameters: FIND.parameters,
    planning: Planning::ByIndex,
};

/// $1 to $4 as in [`FIND`], $5 amount: locks the account where its balance suffices and takes the key with the final
/// response; no row if the balance does not suffice, the account does not exist, or the key is taken.
///
/// The account is locked before the key, since the foreign key's lock on a row that somebody then updates would make a
/// MultiXact for each concurrent request. FOR UPDATE would deadlock with the foreign key's locks.
pub static CLAIM_DEBIT: Statement = Statement {
    text: "INSERT INTO @extschema@.request_result (account_id, operation, request_key, request, response)
           SELECT account.account_id, $2, $3, $4,
                  pg_catalog.jsonb_build_object('balance', account.balance OPERATOR(pg_catalog.-) $5)
             FROM @extschema@.account
            WHERE account.account_id OPERATOR(pg_catalog.=) $1
              AND account.balance OPERATOR(pg_catalog.>=) $5
              FOR NO KEY UPDATE
           ON CONFLICT (account_id, operation, request_key) DO NOTHING
           RETURNING response",
    parameters: &[
        PgBuiltInOids::INT8OID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::JSONBOID,
        PgBuiltInOids::INT8OID,
    ],
    planning: Planning::ByIndex,
};

/// $1 account, $2 amount to add, $3 the claimed response: whether the new balance is the one that the response names.
pub static ADD_TO_BALANCE: Statement = Statement {
    text: "UPDATE @extschema@.account
              SET balance = balance OPERATOR(pg_catalog.+) $2
            WHERE account_id OPERATOR(pg_catalog.=) $1
           RETURNING pg_catalog.jsonb_build_object('balance', balance) OPERATOR(pg_catalog.=) $3",
    parameters: &[PgBuiltInOids::INT8OID, PgBuiltInOids::INT8OID, PgBuiltInOids::JSONBOID],
    planning: Planning::ByIndex,
};

/// $1 account: its balance.
pub static FIND_BALANCE: Statement = Statement {
    text: "SELECT balance FROM @extschema@.account WHERE account_id OPERATOR(pg_catalog.=) $1",
    parameters: &[PgBuiltInOids::INT8OID],
    planning: Planning::ByIndex,
};

/// $1 retention: up to when records are expired now, or NULL if the retention is negative. An interval such as
/// '1 month -29 days' is negative in some months only, so the date is what counts.
pub static FIND_CUTOFF: Statement = Statement {
    text: "SELECT CASE WHEN $1 OPERATOR(pg_catalog.>=) pg_catalog.make_interval()
                        AND cutoff OPERATOR(pg_catalog.<=) now THEN cutoff END
             FROM (SELECT now, now OPERATOR(pg_catalog.-) $1 AS cutoff
                     FROM (SELECT pg_catalog.clock_timestamp() AS now OFFSET 0) AS clock) AS reading",
    parameters: &[PgBuiltInOids::INTERVALOID],
    planning: Planning::ByIndex,
};

/// $1 cutoff: deletes what is older, and skips what another session is deleting. The locked rows are found again by
/// their place in the table, so that the index on `created_at` is all that is read.
pub static DELETE_EXPIRED_KEYS: Statement = Statement {
    text: "DELETE FROM @extschema@.request_result
            WHERE ctid OPERATOR(pg_catalog.=) ANY (ARRAY(
                  SELECT ctid FROM @extschema@.request_result
                   WHERE created_at OPERATOR(pg_catalog.<) $1
                     FOR UPDATE SKIP LOCKED))",
    parameters: &[PgBuiltInOids::TIMESTAMPTZOID],
    planning: Planning::ForArguments,
};

const FIND_SCHEMA: &str = "SELECT e.oid, pg_catalog.quote_ident(n.nspname)
     FROM pg_catalog.pg_extension AS e
     JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
    WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency_record'";

/// The saved plans of this backend, valid for one incarnation of the extension in one schema.
struct Plans {
    generation: u64,
    extension: pg_sys::Oid,
    schema: Rc<str>,
    saved: Vec<(&'static Statement, Rc<Plan>)>,
}

thread_local! {
    // Not dropped at the end of the process, when the server's memory is gone already.
    static PLANS: ManuallyDrop<RefCell<Option<Plans>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

impl Statement {
    /// Runs the statement, see [`Plan::run`].
    pub fn run<'conn>(
        &'static self,
        connected: &SpiClient<'conn>,
        arguments: &[DatumWithOid<'_>],
    ) -> Result<Rows<'conn>, Error> {
        // No borrow is held while the plan runs: a trigger may call us again.
        self.plan(connected)?.run(connected, arguments)
    }

    fn plan(&'static self, connected: &SpiClient<'_>) -> Result<Rc<Plan>, Error> {
        let schema = schema(connected)?;
        let saved = with_plans(|plans| {
            plans.saved.iter().find(|(statement, _)| std::ptr::eq(*statement, self)).map(|(_, plan)| Rc::clone(plan))
        });
        if let Some(plan) = saved.flatten() {
            return Ok(plan);
        }
        let text = self.text.replace("@extschema@", &schema);
        let plan = Rc::new(Plan::prepare(connected, &text, self.parameters, self.planning)?);
        with_plans(|plans| plans.saved.push((self, Rc::clone(&plan))));
        Ok(plan)
    }
}

fn with_plans<T>(work: impl FnOnce(&mut Plans) -> T) -> Option<T> {
    PLANS.with(|plans| plans.borrow_mut().as_mut().map(work))
}

/// The quoted name of the schema in which the extension lives, looked up again only after a change of the catalogues.
/// Plans of an earlier schema or an earlier incarnation of the extension are let go.
fn schema(connected: &SpiClient<'_>) -> Result<Rc<str>, Error> {
    let generation = catalog_generation();
    let known = with_plans(|plans| (plans.generation == generation).then(|| Rc::clone(&plans.schema)));
    if let Some(schema) = known.flatten() {
        return Ok(schema);
    }
    let found = Plan::prepare(connected, FIND_SCHEMA, &[], Planning::ForArguments)?.run(connected, &[])?;
    let (Some(extension), Some(schema)) = (found.first::<pg_sys::Oid>(1)?, found.first::<String>(2)?) else {
        return Err(Error::NotInstalled);
    };
    let schema: Rc<str> = schema.into();
    let outdated = PLANS.with(|plans| {
        let mut plans = plans.borrow_mut();
        match plans.as_mut() {
            Some(same) if same.extension == extension && same.schema == schema => {
                same.generation = generation;
                None
            }
            _ => plans.replace(Plans { generation, extension, schema: Rc::clone(&schema), saved: Vec::new() }),
        }
    });
    drop(outdated);
    Ok(schema)
}

#[cfg(test)]
mod tests {
    const SOURCE: &str = include_str!("statement.rs");
    const VERBS: [&str; 5] = ["SELECT", "INSERT", "UPDATE", "DELETE", "WITH"];
    /// What may precede a parenthesis without being a function.
    const KEYWORDS: [&str; 8] =
        ["any", "array", "coalesce", "conflict", "from", "operator", "request_result", "select"];

    /// The SQL texts of this file with literals blanked and qualified operators taken out.
    fn texts() -> Vec<String> {
        let code = SOURCE.split("#[cfg(test)]").next().unwrap_or_default();
        let literals = code.split('"').skip(1).step_by(2);
        let texts: Vec<String> =
            literals.filter(|text| VERBS.iter().any(|verb| text.starts_with(verb))).map(bare).collect();
        assert_eq!(texts.len(), code.matches("Statement = Statement {").count() + 1, "with FIND_SCHEMA");
        texts
    }

    fn bare(sql: &str) -> String {
        let mut text: String = sql.split('\'').step_by(2).collect::<Vec<_>>().join("literal");
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
            assert_eq!(signs, text.matches(" SET ").count(), "an operator without OPERATOR(pg_catalog...): {text}");
            for implied in [" IN ", " BETWEEN ", " LIKE ", " DISTINCT ", "NULLIF", " USING "] {
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
                let known =
                    ["@extschema@.", "pg_catalog.", "(", "SKIP", "ON"].iter().any(|start| pair[1].starts_with(start));
                assert!(known, "an unqualified table: {} in {text}", pair[1]);
            }
        }
    }
}
