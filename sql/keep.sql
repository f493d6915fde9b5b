CREATE TRIGGER request_result_keep BEFORE UPDATE OR DELETE ON request_result
    FOR EACH ROW EXECUTE FUNCTION keep_record();
CREATE TRIGGER request_result_keep_all BEFORE TRUNCATE ON request_result
    FOR EACH STATEMENT EXECUTE FUNCTION keep_record();
CREATE TRIGGER processed_message_keep BEFORE UPDATE OR DELETE ON processed_message
    FOR EACH ROW EXECUTE FUNCTION keep_record();
CREATE TRIGGER processed_message_keep_all BEFORE TRUNCATE ON processed_message
    FOR EACH STATEMENT EXECUTE FUNCTION keep_record();

COMMENT ON TRIGGER request_result_keep ON request_result IS
    'A record is never changed, and deleted only when its retention has passed. Logical replication and pg_restore do not fire it; a superuser or the owner can disable it.';
COMMENT ON TRIGGER request_result_keep_all ON request_result IS
    'Records are not truncated away.';
COMMENT ON TRIGGER processed_message_keep ON processed_message IS
    'A record is never changed, and deleted only when its retention has passed. Logical replication and pg_restore do not fire it; a superuser or the owner can disable it.';
COMMENT ON TRIGGER processed_message_keep_all ON processed_message IS
    'Records are not truncated away.';
