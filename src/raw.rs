//! Where pgrx offers nothing safe. All `unsafe` code of the extension stands in this room.

mod call;
mod catalog;
mod plan;
mod scan;
mod setting;
mod value;

pub use catalog::{catalog_generation, is_current_transaction};
pub use plan::{Plan, Planning, Rows};
pub use scan::{Extension, PolicyRow, find_extension, find_policy};
pub use setting::reserve_settings;
pub use value::{Int8Array, Jsonb, JsonbArray, Procedure, Text, UuidArray};
