//! Where pgrx offers nothing safe. All `unsafe` code of the extension stands in this room.

mod catalog;
mod plan;
mod value;

pub use catalog::catalog_generation;
pub use plan::{Plan, Planning, Rows};
pub use value::{Jsonb, Text};
