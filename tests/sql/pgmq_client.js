// Every call of pgmq-js, the client of pgmq on npm, as its page shows them: a line for each answer, without times.
//     node pgmq_client.js HOST PORT DATABASE
const { Pgmq } = require('pgmq-js');

const [host, port, database] = process.argv.slice(2);
const seen = (m) => m && { id: m.msgId, read: m.readCount, message: m.message, hidden: m.vt > new Date() };
const tell = (call, answer) => console.log(call, JSON.stringify(answer ?? null));

async function main() {
  const given = { host, port: Number(port), database, user: 'postgres', password: 'x', ssl: false };
  const pgmq = await Pgmq.new(given, { skipExtensionCreation: true });
  const q = 'orders';
  await pgmq.queue.create(q);
  await pgmq.queue.createUnlogged('quick');
  const queues = await pgmq.queue.list();
  tell('list', queues.map((each) => [each.name, each.isPartitioned, each.isUnlogged]).sort());
  tell('send', await pgmq.msg.send(q, { id: 1, name: 'a' }));
  tell('send later', await pgmq.msg.send(q, { id: 2 }, 100));
  tell('sendBatch', await pgmq.msg.sendBatch(q, [{ id: 3 }, { id: 4 }, { id: 5 }, { id: 6 }]));
  const metrics = await pgmq.queue.getMetrics(q);
  tell('getMetrics', [metrics.queueName, metrics.queueLength, metrics.totalMessages]);
  tell('getAllMetrics', (await pgmq.queue.getAllMetrics()).map((each) => each.queueName).sort());
  tell('read', seen(await pgmq.msg.read(q, 30)));
  tell('readBatch', (await pgmq.msg.readBatch(q, 30, 2)).map(seen));
  // It gives no types, and is ambiguous since pgmq has set_vt with a time, too.
  tell('setVt', await pgmq.msg.setVt(q, 1, 0).then(seen, (error) => error.message));
  tell('read more', seen(await pgmq.msg.read(q, 30)));
  tell('pop', (await pgmq.msg.pop(q)).message);
  tell('archive', await pgmq.msg.archive(q, 1));
  tell('archive again', await pgmq.msg.archive(q, 1));
  tell('archiveBatch', (await pgmq.msg.archiveBatch(q, [3, 99])).sort());
  tell('delete', await pgmq.msg.delete(q, 4));
  tell('deleteBatch', (await pgmq.msg.deleteBatch(q, [4, 6])).sort());
  tell('read nothing', await pgmq.msg.read(q, 30));
  await pgmq.queue.purge(q);
  tell('purged', (await pgmq.queue.getMetrics(q)).queueLength);
  await pgmq.queue.drop(q);
  tell('dropped', (await pgmq.queue.list()).map((each) => each.name));
  await pgmq.close();
}

main().catch((error) => { console.log(String(error)); process.exit(1); });
