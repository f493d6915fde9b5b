//! Where pgrx offers nothing safe. All `unsafe` code of the extension stands in this room.

mod call;
mod catalog;
mod claim;
mod lookup;
mod plan;
mod scan;
mod setting;
mod transaction;
mod value;
mod worker;

pub use catalog::{accept_invalidations, catalog_generation, is_current_transaction};
pub use claim::{Claim, ClaimTables, Claimed, Claiming, claim};
pub use lookup::{Columns, Lookup, Saved, find_saved};
pub use plan::{Bytes, Plan, Planning, Rows};
pub use scan::{
    Extension, PolicyRow, RecordTable, deleted_record, find_extension, find_fence, find_owner, find_policy,
    find_subscriber_retention, has_row_security, trigger,
};
pub use setting::reserve_settings;
pub use transaction::{ActingAs, Call};
pub use value::{Int8Array, Jsonb, JsonbArray, Procedure, Row, Text, TextArray, UuidArray};
pub use worker::{
    current_database, find_databases, in_transaction, is_in_recovery, is_preloading, next_transaction, raise,
    reload_configuration, report_activity, set_transaction_defaults,
};
