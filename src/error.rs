//! Every refusal of the extension with its SQLSTATE. Errors of the server itself pass through unchanged.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::batch::ELEMENTS;
use crate::request::KEY_BYTES;

/// What can be refused. No variant carries a saved request or response: the caller may be guessing keys.
#[derive(Debug)]
pub enum Error {
    /// A NULL or empty argument.
    Required(&'static str),
    /// NULL or empty key, NULL or non-positive amount.
    KeyAndAmountRequired,
    /// A key, subscriber or entity of so many bytes.
    TooLong(&'static str, usize),
    /// The name of an operation that is NULL, too long, or not `name:vN`.
    Operation,
    /// An operation that only a function of its own may execute.
    BuiltIn(String),
    /// A handler that does not exist, or has another signature.
    HandlerSignature(Option<String>),
    /// A handler that the caller may not execute.
    HandlerDenied(String),
    /// A handler that returned NULL.
    NullResponse,
    /// A handler that executes its own request again.
    Reentered,
    /// A key that was cancelled.
    Cancelled,
    /// A known message id with another account or payload.
    MessageReused(&'static str),
    /// Arrays of unequal length, with more than one dimension, NULL, or with NULL elements.
    Arrays,
    /// Arrays of a batch that are NULL, of unequal length, or of more than one dimension.
    BatchArrays,
    /// A batch of so many elements.
    BatchTooLarge(usize),
    /// A balance that does not fit a bigint.
    OutOfRange,
    /// A value nested too deeply for a fingerprint.
    TooComplex,
    /// A known key with another request; the names of the fields that differ, empty where there are none.
    KeyReused(String),
    /// No such account.
    UnknownAccount(i64),
    /// The account holds less than the amount.
    InsufficientBalance(i64),
    /// A trigger undid or changed our write to this table, so that the record would lie.
    WriteSuppressed(&'static str),
    /// An account that row security does not let the caller see, or not update.
    AccountDenied(i64),
    /// A record that was inserted by hand, hence without the account's lock, while the request was executed.
    RecordedMeanwhile,
    /// A dated key of a batch whose record, if there was one, was purged while the batch ran.
    PurgedMeanwhile,
    /// A dated key or message id with no record, from before the last purge.
    Expired(&'static str),
    /// A key or message id that is dated in the future.
    FromTheFuture(&'static str),
    /// A record that is changed, or deleted before its time.
    RecordKept(&'static str),
    /// The trigger function, called as another function is.
    NotATrigger,
    /// NULL or negative retention.
    RetentionRequired,
    /// A retention below `idempotency_record.minimum_retention`; of which operation or subscriber, if it was declared.
    RetentionTooShort(Option<String>),
    /// A batch of no records, or NULL, or too many.
    BatchSize,
    /// A negative time budget.
    TimeBudget,
    /// A procedure that commits, within a transaction that is not its own.
    WithinTransaction,
    /// A function of the extension runs, but `pg_extension` does not know it.
    NotInstalled,
    /// A table of the extension is not what it was created as.
    ForeignTable,
    /// A plan that changes of the catalogues made invalid each time that it was made.
    Unsettled,
    /// A request could not be written as JSON, or the server's JSON not be read; no value is known that leads here.
    Json(serde_json::Error),
    /// SPI returned this code where it should have raised an error; no SQL is known that leads here.
    Spi(i32),
}

impl From<Error> for ErrorReport {
    fn from(error: Error) -> Self {
        let (code, message, detail, hint) = error.parts();
        let mut report = ErrorReport::new(code, message, "idempotency_record");
        if let Some(detail) = detail {
            report = report.set_detail(detail);
        }
        if let Some(hint) = hint {
            report = report.set_hint(hint);
        }
        report
    }
}

impl Error {
    /// SQLSTATE and primary message, for a refusal that is reported in a row.
    pub fn code_and_message(self) -> (String, String) {
        let (code, message, ..) = self.parts();
        // Five characters of six bits each, as MAKE_SQLSTATE packs them.
        let code = (0..5).map(|at| char::from((((code as i32) >> (6 * at)) & 0x3f) as u8 + b'0')).collect();
        (code, message)
    }

    fn parts(self) -> (PgSqlErrorCode, String, Option<String>, Option<String>) {
        use PgSqlErrorCode as Code;

        let text = |value: &str| Some(value.to_owned());
        match self {
            Self::Required(what) => (Code::ERRCODE_INVALID_PARAMETER_VALUE, format!("{what} required"), None, None),
            Self::KeyAndAmountRequired => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "key and positive amount required".into(),
                None,
                text("Send the same non-empty key with every attempt at one intention, and an amount above zero."),
            ),
            Self::TooLong(what, bytes) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                format!("{what} too long: {bytes} bytes, the limit is {KEY_BYTES} bytes"),
                None,
                text("Use a UUID or a short business reference."),
            ),
            Self::Operation => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "operation is not a name with a version".into(),
                None,
                text(
                    "Name it like \"invoice:v1\": letters, digits, and \"_\", \"-\" or \".\", then \":v\" and a number, at most 63 bytes.",
                ),
            ),
            Self::BuiltIn(operation) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                format!("operation \"{operation}\" is built in"),
                None,
                text("Call debit_once or credit_once, or give your operation another name."),
            ),
            Self::HandlerSignature(name) => (
                Code::ERRCODE_UNDEFINED_FUNCTION,
                "handler does not have the expected signature".into(),
                name.map(|name| format!("The handler is {name}.")),
                text("A handler is a function (bigint, jsonb) RETURNS jsonb: it gets the account and the request."),
            ),
            Self::HandlerDenied(name) => (
                Code::ERRCODE_INSUFFICIENT_PRIVILEGE,
                format!("permission denied for function {name}"),
                None,
                text("The handler runs with the caller's own rights, who needs EXECUTE on it and USAGE on its schema."),
            ),
            Self::NullResponse => (
                Code::ERRCODE_NULL_VALUE_NOT_ALLOWED,
                "handler returned NULL".into(),
                None,
                text("Return a jsonb, such as '{}', or raise an error to refuse the request."),
            ),
            Self::Reentered => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "request is being executed by this session".into(),
                Some(
                    "The handler of a request, or what it called, used the request's own account, operation and key."
                        .into(),
                ),
                text("Use another key inside the handler."),
            ),
            Self::Cancelled => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "request was cancelled".into(),
                None,
                text("It never ran and never will. Use a new key for a new intention."),
            ),
            Self::MessageReused(field) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                format!("message id reused with different {field}"),
                None,
                text("The message was not applied. Find out which of the two the publisher meant."),
            ),
            Self::Arrays => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "arrays of equal length without NULL required".into(),
                None,
                text("Give one message id and one account for each message, and one payload if any."),
            ),
            Self::BatchArrays => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "three arrays of one dimension and equal length required".into(),
                None,
                text("Give one account, one key and one amount for each element."),
            ),
            Self::BatchTooLarge(elements) => (
                Code::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
                format!("batch too large: {elements} elements, the limit is {ELEMENTS}"),
                None,
                text("Make several batches of it."),
            ),
            Self::OutOfRange => {
                (Code::ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE, "bigint out of range".into(), None, None)
            }
            Self::TooComplex => (
                Code::ERRCODE_STATEMENT_TOO_COMPLEX,
                "value is nested too deeply for a fingerprint".into(),
                None,
                text("Nest at most 127 levels."),
            ),
            Self::KeyReused(fields) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "idempotency key reused with different request".into(),
                (!fields.is_empty()).then(|| format!("Differs from the saved request in: {fields}.")),
                text("Send the same request with the same key, or a new key for a new intention."),
            ),
            Self::UnknownAccount(account) => (
                Code::ERRCODE_FOREIGN_KEY_VIOLATION,
                format!("account {account} does not exist"),
                None,
                text("Nothing was recorded: once the account exists, the same call may succeed."),
            ),
            Self::InsufficientBalance(account) => (
                Code::ERRCODE_RAISE_EXCEPTION,
                "insufficient balance".into(),
                Some(format!("Account {account} holds less than the amount.")),
                text("Nothing was recorded: after a top-up the same call may succeed."),
            ),
            Self::WriteSuppressed(table) => (
                Code::ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION,
                format!("a trigger suppressed or changed the write to table \"{table}\""),
                None,
                text("A record has to say what happened: raise an error in the trigger to refuse the operation."),
            ),
            Self::AccountDenied(account) => (
                Code::ERRCODE_INSUFFICIENT_PRIVILEGE,
                format!("permission denied for account {account}"),
                None,
                text("Row security of table \"account\" does not let the caller use it."),
            ),
            Self::RecordedMeanwhile => (
                Code::ERRCODE_T_R_SERIALIZATION_FAILURE,
                "the request was recorded by another session".into(),
                Some("A record of this key was inserted by hand at the same time.".into()),
                text("Retry with the same key in a new transaction."),
            ),
            Self::PurgedMeanwhile => (
                Code::ERRCODE_T_R_SERIALIZATION_FAILURE,
                "records as old as a key of the batch were purged".into(),
                Some("Nothing was done.".into()),
                text("Retry with the same keys in a new transaction, which says in its row that the key expired."),
            ),
            Self::RecordKept(what) => (
                Code::ERRCODE_RESTRICT_VIOLATION,
                format!("a record cannot be {what}"),
                Some("A repeat of its request would be answered otherwise, or executed again.".into()),
                text("Records go by purge, when their retention has passed."),
            ),
            Self::NotATrigger => (
                Code::ERRCODE_FEATURE_NOT_SUPPORTED,
                "trigger functions can only be called as triggers".into(),
                None,
                None,
            ),
            Self::RetentionRequired => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "retention of zero or more required".into(),
                None,
                text("Give the time that was promised to the slowest client, such as interval '48 hours'."),
            ),
            Self::Expired(what) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                format!("{what} expired"),
                Some("There is no record, and records as old as its date have been purged: it may have been executed before.".into()),
                text("Find out by the business reference what happened, then use a new one."),
            ),
            Self::FromTheFuture(what) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                format!("{what} is dated in the future"),
                Some("Its date is ahead of the server's clock by more than idempotency_record.clock_skew.".into()),
                text("Set the clock of the client that made it."),
            ),
            Self::RetentionTooShort(declared) => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "retention is shorter than the minimum".into(),
                declared.map(|of| format!("It is the retention of {of}. Nothing was purged.")),
                text("Give at least idempotency_record.minimum_retention, which a superuser can lower."),
            ),
            Self::BatchSize => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "batch size of 1 to 1000000 required".into(),
                None,
                None,
            ),
            Self::TimeBudget => (
                Code::ERRCODE_INVALID_PARAMETER_VALUE,
                "time budget of zero or more required".into(),
                None,
                text("NULL is no limit."),
            ),
            Self::WithinTransaction => (
                Code::ERRCODE_INVALID_TRANSACTION_TERMINATION,
                "purge cannot be called where it cannot commit".into(),
                Some("It commits after each batch, which a transaction block, a function, and a setting of the procedure's own do not allow.".into()),
                text("Call it by itself, or use purge_expired_keys and purge_processed_messages."),
            ),
            Self::NotInstalled => (
                Code::ERRCODE_UNDEFINED_OBJECT,
                "extension \"idempotency_record\" is not installed in this database".into(),
                None,
                text("Run CREATE EXTENSION idempotency_record."),
            ),
            Self::ForeignTable => (
                Code::ERRCODE_DATATYPE_MISMATCH,
                "a table of extension \"idempotency_record\" is not as it was created".into(),
                Some("It was renamed or replaced, or a column does not have the type that it was created with.".into()),
                text("Undo that change."),
            ),
            Self::Unsettled => (
                Code::ERRCODE_T_R_SERIALIZATION_FAILURE,
                "the catalogues change too fast".into(),
                Some("Nothing was done.".into()),
                text("Retry with the same key in a new transaction."),
            ),
            Self::Json(error) => {
                (Code::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION, format!("JSON not understood: {error}"), None, None)
            }
            Self::Spi(error) => (Code::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION, format!("SPI failed: {error}"), None, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Error> {
        let json = serde_json::from_str::<i64>("").expect_err("nothing to parse");
        vec![
            Error::Required("account"),
            Error::KeyAndAmountRequired,
            Error::TooLong("key", 256),
            Error::Operation,
            Error::BuiltIn("debit:v1".into()),
            Error::HandlerSignature(None),
            Error::HandlerSignature(Some("public.handler".into())),
            Error::HandlerDenied("public.handler".into()),
            Error::NullResponse,
            Error::Reentered,
            Error::Cancelled,
            Error::MessageReused("payload"),
            Error::Arrays,
            Error::BatchArrays,
            Error::BatchTooLarge(100_001),
            Error::OutOfRange,
            Error::TooComplex,
            Error::KeyReused("amount".into()),
            Error::KeyReused(String::new()),
            Error::UnknownAccount(7),
            Error::InsufficientBalance(7),
            Error::WriteSuppressed("account"),
            Error::AccountDenied(7),
            Error::RecordedMeanwhile,
            Error::PurgedMeanwhile,
            Error::Expired("idempotency key"),
            Error::FromTheFuture("message id"),
            Error::RecordKept("updated"),
            Error::NotATrigger,
            Error::RetentionRequired,
            Error::RetentionTooShort(None),
            Error::RetentionTooShort(Some("operation debit:v1".into())),
            Error::BatchSize,
            Error::TimeBudget,
            Error::WithinTransaction,
            Error::NotInstalled,
            Error::ForeignTable,
            Error::Unsettled,
            Error::Json(json),
            Error::Spi(-1),
        ]
    }

    #[test]
    fn only_what_came_in_between_is_worth_a_retry() {
        for error in all() {
            let worth_it = matches!(error, Error::RecordedMeanwhile | Error::PurgedMeanwhile | Error::Unsettled);
            let (code, message, ..) = error.parts();
            assert_eq!(worth_it, code == PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE, "{message}");
        }
    }

    #[test]
    fn a_refusal_in_a_row_has_the_sqlstate_that_an_error_would_have() {
        for (error, expected) in [
            (Error::KeyAndAmountRequired, "22023"),
            (Error::UnknownAccount(7), "23503"),
            (Error::InsufficientBalance(7), "P0001"),
            (Error::OutOfRange, "22003"),
            (Error::RecordedMeanwhile, "40001"),
        ] {
            assert_eq!(error.code_and_message().0, expected);
        }
    }

    #[test]
    fn no_refusal_is_an_internal_error() {
        for error in all() {
            let (code, message, ..) = error.parts();
            assert_ne!(code, PgSqlErrorCode::ERRCODE_INTERNAL_ERROR, "{message}");
        }
    }

    #[test]
    fn texts_follow_the_style_of_postgresql() {
        for error in all() {
            let (_, message, detail, hint) = error.parts();
            assert!(
                !message.starts_with(char::is_uppercase) || message.starts_with("SPI") || message.starts_with("JSON"),
                "{message}"
            );
            assert!(!message.ends_with('.'), "{message}");
            for sentence in detail.iter().chain(hint.iter()) {
                assert!(sentence.starts_with(char::is_uppercase) && sentence.ends_with('.'), "{sentence}");
            }
        }
    }
}
