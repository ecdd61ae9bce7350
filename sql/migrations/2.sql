-- From version 1 (0.1.0). Keeps what consumers are owed, and settles claims that were made before.
do $$
begin
    if not exists (select from pgqueue.installed where version = 1)
       or exists (select from pgqueue.installed where version = 2) then
        return;
    end if;
end $$;
