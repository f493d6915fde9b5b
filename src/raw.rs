//! Where pgrx offers nothing safe. All `unsafe` code of the extension stands in this room.

mod call;
mod catalog;
mod plan;
mod role;
mod setting;
mod value;

pub use catalog::catalog_generation;
pub use plan::{Plan, Planning, Rows};
pub use role::AsRole;
pub use setting::reserve_settings;
pub use value::{Int8Array, Jsonb, JsonbArray, Procedure, Text, UuidArray};
