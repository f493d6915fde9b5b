//! Calling a function of the user's by its oid.

use pgrx::prelude::*;
use pgrx::spi::SpiClient;

use super::{Jsonb, Procedure};

impl Procedure {
    /// Calls the function, of whose arguments and result the caller of this one is sure, with a fresh snapshot at READ
    /// COMMITTED. `None` if it returns NULL. By name, an overload with defaults would make the call ambiguous.
    pub fn call(self, _connected: &SpiClient<'_>, account: i64, request: Jsonb) -> Option<Jsonb> {
        const ARGUMENTS: usize = 2;
        // SAFETY: the call is what the server's own FunctionCallInvoke makes of an oid: zeroed memory of the server for
        // the call's frame with room for its arguments, which the function may keep as long as its memory context lives.
        // An error leaves the snapshot to the server's clean-up, as in the server's own code. SPI is connected, so that
        // the result can be copied to where the caller of our function finds it.
        unsafe {
            let size = size_of::<pg_sys::FunctionCallInfoBaseData>() + ARGUMENTS * size_of::<pg_sys::NullableDatum>();
            let function = pg_sys::palloc0(size_of::<pg_sys::FmgrInfo>()).cast::<pg_sys::FmgrInfo>();
            let frame = pg_sys::palloc0(size).cast::<pg_sys::FunctionCallInfoBaseData>();
            pg_sys::fmgr_info(pg_sys::Oid::from_datum(self.0, false)?, function);
            let address = (*function).fn_addr?;
            (*frame).flinfo = function;
            (*frame).nargs = ARGUMENTS as i16;
            let arguments = (*frame).args.as_mut_ptr();
            *arguments = pg_sys::NullableDatum { value: account.into(), isnull: false };
            *arguments.add(1) = pg_sys::NullableDatum { value: request.0, isnull: false };

            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let result = pg_sys::ffi::pg_guard_ffi_boundary(|| address(frame));
            pg_sys::PopActiveSnapshot();
            (!(*frame).isnull).then(|| Jsonb(pg_sys::SPI_datumTransfer(result, false, -1)))
        }
    }
}
