-- Every object that the extension owns, each with its comment and properties: nothing comes or goes unnoticed.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;

-- The objects. The row types and array types of tables are left out: only some majors list them as the extension's.
CREATE VIEW owned AS
    SELECT classid, objid FROM pg_depend JOIN pg_extension AS e ON refclassid = 'pg_extension'::regclass AND refobjid = e.oid
     WHERE deptype = 'e' AND extname = 'idempotency_record'
       AND (classid <> 'pg_type'::regclass
            OR objid NOT IN (SELECT oid FROM pg_type WHERE typrelid <> 0 OR typelem IN (SELECT oid FROM pg_type WHERE typrelid <> 0)));
SELECT (pg_identify_object(classid, objid, 0)).type, (pg_identify_object(classid, objid, 0)).identity,
       obj_description(objid, classid::regclass::name) IS NOT NULL AS commented
  FROM owned ORDER BY 1, 2;

-- What belongs to its tables. Names of NOT NULL constraints are left out, which 18 has and its predecessors have not.
SELECT attrelid::regclass AS "table", attname AS "column", format_type(atttypid, atttypmod) AS type,
       (SELECT collname FROM pg_collation WHERE oid = attcollation AND collname <> 'default') AS collation, attnotnull AS "not null",
       pg_get_expr(adbin, adrelid) AS "default", attidentity <> '' AS identity, attgenerated <> '' AS generated,
       col_description(attrelid, attnum) IS NOT NULL AS commented
  FROM owned JOIN pg_attribute ON attrelid = objid AND attnum > 0 AND NOT attisdropped
  LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
 WHERE classid = 'pg_class'::regclass ORDER BY attrelid::regclass::text, attnum;
SELECT conrelid::regclass AS "table", conname AS "constraint", pg_get_constraintdef(c.oid) AS definition, convalidated AS valid,
       condeferrable AS deferrable
  FROM owned JOIN pg_constraint AS c ON conrelid = objid WHERE classid = 'pg_class'::regclass AND contype <> 'n'
 ORDER BY conrelid::regclass::text, conname;
SELECT indrelid::regclass AS "table", pg_get_indexdef(indexrelid) AS index, indisunique AS "unique", indisvalid AS valid
  FROM owned JOIN pg_index ON indrelid = objid WHERE classid = 'pg_class'::regclass ORDER BY indrelid::regclass::text, 2;
SELECT objid::regclass AS "table", relkind AS kind, relpersistence AS persistence, relrowsecurity AS "row security",
       relhastriggers AS "has triggers", relreplident AS "replica identity", reloptions AS options, relacl IS NOT NULL AS "has an ACL"
  FROM owned JOIN pg_class AS c ON c.oid = objid WHERE classid = 'pg_class'::regclass ORDER BY objid::regclass::text;
SELECT count(*) AS "user triggers" FROM owned JOIN pg_trigger ON tgrelid = objid
 WHERE classid = 'pg_class'::regclass AND NOT tgisinternal;
SELECT count(*) AS rules FROM owned JOIN pg_rewrite ON ev_class = objid WHERE classid = 'pg_class'::regclass;

-- What has no comment, among everything that can have one. A primary key's index is described by its constraint.
SELECT kind, identity FROM (
    SELECT 'extension' AS kind, extname::text AS identity, obj_description(oid, 'pg_extension') AS comment
      FROM pg_extension WHERE extname = 'idempotency_record'
    UNION ALL
    SELECT (pg_identify_object(classid, objid, 0)).type, (pg_identify_object(classid, objid, 0)).identity,
           obj_description(objid, classid::regclass::name)
      FROM owned
    UNION ALL
    SELECT 'column', attrelid::regclass || '.' || attname, col_description(attrelid, attnum)
      FROM owned JOIN pg_attribute ON attrelid = objid AND attnum > 0 AND NOT attisdropped WHERE classid = 'pg_class'::regclass
    UNION ALL
    SELECT 'constraint', conrelid::regclass || '.' || conname, obj_description(c.oid, 'pg_constraint')
      FROM owned JOIN pg_constraint AS c ON conrelid = objid WHERE classid = 'pg_class'::regclass AND contype <> 'n'
    UNION ALL
    SELECT 'index', indexrelid::regclass::text, obj_description(indexrelid, 'pg_class')
      FROM owned JOIN pg_index ON indrelid = objid
     WHERE classid = 'pg_class'::regclass AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('p', 'u', 'x'))
) AS described WHERE coalesce(comment, '') = '' ORDER BY 1, 2;

-- The functions: nobody but the owner may execute them, NULL reaches them, and no planner may skip, repeat or share a call.
SELECT objid::regprocedure AS function, pg_get_function_arguments(objid) AS arguments, pg_get_function_result(objid) AS result,
       provolatile AS volatility, proparallel AS parallel, proisstrict AS strict, proleakproof AS leakproof, prosecdef AS "security definer",
       proconfig AS settings, lanname AS language, probin AS library
  FROM owned JOIN pg_proc AS p ON p.oid = objid JOIN pg_language AS l ON l.oid = prolang
 WHERE classid = 'pg_proc'::regclass ORDER BY objid::regprocedure::text;
SELECT objid::regprocedure AS function, array_agg(coalesce(nullif(grantee, 0)::regrole::text, 'PUBLIC') || ' ' || privilege_type) = ARRAY[proowner::regrole || ' EXECUTE'] AS "owner only"
  FROM owned JOIN pg_proc AS p ON p.oid = objid, aclexplode(coalesce(proacl, acldefault('f', proowner)))
 WHERE classid = 'pg_proc'::regclass GROUP BY objid, proowner ORDER BY objid::regprocedure::text;

-- The extension itself, and which tables pg_dump writes the rows of.
SELECT extrelocatable AS relocatable, extversion IS NOT NULL AS versioned FROM pg_extension WHERE extname = 'idempotency_record';
SELECT table_oid::regclass AS dumped, condition
  FROM pg_extension, unnest(extconfig, extcondition) AS dump (table_oid, condition) WHERE extname = 'idempotency_record' ORDER BY table_oid::regclass::text;
SELECT objid::regclass AS "not dumped" FROM owned
 WHERE classid = 'pg_class'::regclass AND objid IN (SELECT oid FROM pg_class WHERE relkind = 'r')
   AND objid <> ALL (SELECT unnest(extconfig) FROM pg_extension WHERE extname = 'idempotency_record');
SELECT superuser, trusted, relocatable, schema, requires FROM pg_available_extension_versions WHERE name = 'idempotency_record' AND installed;

-- It needs nothing but what every database has.
SELECT pg_describe_object(refclassid, refobjid, refobjsubid) AS needs FROM pg_depend
 WHERE classid = 'pg_extension'::regclass AND objid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency_record');

DROP VIEW owned;
DROP EXTENSION idempotency_record;
